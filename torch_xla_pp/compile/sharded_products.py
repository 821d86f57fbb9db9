"""Products of matrices on each device's parts, where these are known.

XLA cannot split a call over devices. Here a product is cut before: each device
multiplies its parts of the factors with a library, and where the sum goes over what is
split, XLA adds up what the devices found. If what is known of the factors' parts
does not fit together the product is XLA's.

In all products here, factors have the dimensions of the batch in front; those that are
summed over come next or last.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, fx

from torch_xla_pp import cpu, xla_compat
from torch_xla_pp.compile.axis_places import AxisPlaces, axis_places
from torch_xla_pp.compile.group_sums.batch_dims import shape_of
from torch_xla_pp.graph import SHARD, axes_of
from torch_xla_pp.mesh import (
    Axis,
    LocalMesh,
    LogicalAxes,
    Partition,
    axis_names,
    axis_of,
)


class Factor(NamedTuple):
    """A factor of a product, of any dimensions.

    Attributes:
        value: The factor.
        partition: Which axes of the mesh split it, None if that is not known.
    """

    value: Tensor
    partition: Partition | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedProducts:
    """How products run on each device's parts.

    Args:
        multiply: Multiplies one device's parts.
        local: The devices.
        layout: Takes the axes that `shard` was called with; returns the partition, None
            for any.
        sharding: Returns torch_xla's sharding for a partition.
        partitions_of: Returns the partitions of values, None where these are not known.
    """

    multiply: cpu.PartProduct
    local: LocalMesh
    layout: Callable[[LogicalAxes], Partition | None]
    sharding: Callable[[Partition], xla_compat.OpSharding]
    partitions_of: Callable[[Sequence[Tensor]], list[Partition | None]]

    def places(self, graph: fx.Graph, values: Mapping[fx.Node, Any]) -> AxisPlaces:
        """Find what the mesh's axes split in a graph whose placeholders are known."""
        inputs = [
            node
            for node in graph.nodes
            if shape_of(node)
            and node.op in ("placeholder", "get_attr")
            and isinstance(values.get(node), Tensor)
        ]
        found = self.partitions_of([values[node] for node in inputs])
        known = dict(zip(inputs, found, strict=True))
        for node in graph.find_nodes(op="call_function", target=SHARD):
            axes: Any = node.args[1]
            layout = self.layout(axes_of(axes))
            if layout is not None:
                known[node] = layout
        return axis_places(graph, known, self.local.axis_size)

    def product(
        self,
        left: Factor,
        right: Factor,
        sums: tuple[Sequence[int], Sequence[int]],
        batch: Sequence[int] = (),
    ) -> Tensor | None:
        """Multiply as `xla_compat.product` does; None for what is XLA's."""
        plan = _plan(left, right, sums, len(batch))
        if plan is None or not self._divides(left, plan.left, right, plan.right):
            return None
        shape = (*left.value.shape[: len(batch)], *plan.free_shape)
        partition: Partition = (*plan.left[: len(batch)], *plan.free)
        if plan.summed:
            axis = axis_of(plan.summed)
            shape = (self.local.axis_size(axis), *shape)
            partition = (axis, *partition)
        part = self.multiply(
            self._parts(left, plan.left),
            self._parts(right, plan.right),
            self._sides(left, right, plan, sums, len(batch)),
            self.local.shard_shape(shape, partition),
            _text(shape, partition),
        )
        if part is None:
            return None
        sharding, dtype = self.sharding(partition), left.value.dtype
        whole = xla_compat.from_shards(part, sharding, shape, dtype)
        return whole.sum(0) if plan.summed else whole

    def _parts(self, factor: Factor, partition: Partition) -> Tensor:
        """Return each device's part; a factor that is split otherwise moves first."""
        value, sharding = factor.value, self.sharding(partition)
        if partition != factor.partition:
            value = xla_compat.constrain(value, sharding)
        return xla_compat.to_shards(value, sharding)

    def _divides(
        self, left: Factor, of_left: Partition, right: Factor, of_right: Partition
    ) -> bool:
        faults = self.local.faults(tuple(left.value.shape), of_left)
        return not faults + self.local.faults(tuple(right.value.shape), of_right)

    def _sides(
        self,
        left: Factor,
        right: Factor,
        plan: "_Plan",
        sums: tuple[Sequence[int], Sequence[int]],
        num_batch: int,
    ) -> cpu.ProductSides:
        first = self.local.shard_shape(tuple(left.value.shape), plan.left)
        second = self.local.shard_shape(tuple(right.value.shape), plan.right)
        batch = math.prod(first[:num_batch])
        depth = math.prod(first[dim] for dim in sums[0])
        return cpu.ProductSides(
            batch=batch,
            rows=math.prod(first) // (batch * depth),
            depth=depth,
            columns=math.prod(second) // (batch * depth),
            is_left_turned=plan.is_left_turned,
            is_right_turned=plan.is_right_turned,
        )


class _Plan(NamedTuple):
    """How a product is cut.

    Attributes:
        left: The partition in which the left factor is multiplied.
        right: That of the right one.
        free: The partition of what is left of both behind the batch.
        free_shape: The sizes of these dimensions.
        summed: The axes of the mesh that split what is summed over.
        is_left_turned: Whether these dimensions come next to the batch in the left one.
        is_right_turned: Whether they are the last ones of the right one.
    """

    left: Partition
    right: Partition
    free: Partition
    free_shape: tuple[int, ...]
    summed: tuple[str, ...]
    is_left_turned: bool
    is_right_turned: bool


def _plan(
    left: Factor,
    right: Factor,
    sums: tuple[Sequence[int], Sequence[int]],
    num_batch: int,
) -> _Plan | None:
    """Cut a product so that both factors' parts fit, None if nothing is known."""
    if left.partition is None or right.partition is None:
        return None
    is_next = [
        _is_next(factor.value.dim(), num_batch, summed)
        for factor, summed in zip((left, right), sums, strict=True)
    ]
    if None in is_next:
        return None
    first, second = list(left.partition), list(right.partition)
    pairs = [(dim, dim) for dim in range(num_batch)]
    for one, other in itertools.chain(pairs, zip(*sums, strict=True)):
        if None not in (first[one], second[other]) and first[one] != second[other]:
            return None
        first[one] = second[other] = first[one] or second[other]
    dims = [
        [d for d in range(num_batch, factor.value.dim()) if d not in summed]
        for factor, summed in zip((left, right), sums, strict=True)
    ]
    free = (*(first[d] for d in dims[0]), *(second[d] for d in dims[1]))
    summed_axes = [name for dim in sums[0] for name in axis_names(first[dim])]
    used = [n for axis in (*first[:num_batch], *free) for n in axis_names(axis)]
    used += summed_axes
    if len(used) != len(set(used)):
        return None
    return _Plan(
        left=tuple(first),
        right=tuple(second),
        free=free,
        free_shape=(
            *(left.value.shape[d] for d in dims[0]),
            *(right.value.shape[d] for d in dims[1]),
        ),
        summed=tuple(summed_axes),
        is_left_turned=bool(is_next[0]),
        is_right_turned=not is_next[1],
    )


def _is_next(count: int, num_batch: int, summed: Sequence[int]) -> bool | None:
    """Return whether dimensions come next to the batch, None if neither nor last."""
    if list(summed) == list(range(count - len(summed), count)):
        return False
    return True if list(summed) == [num_batch + i for i in range(len(summed))] else None


def _text(shape: Sequence[int], partition: Partition) -> str:
    """Tell apart results of equal parts."""
    axes = ["+".join(axis_names(axis)) for axis in partition]
    return "x".join(
        f"{size}/{axis}" if axis else str(size)
        for size, axis in zip(shape, axes, strict=True)
    )


def partition_at(
    places: Mapping[Axis, Any], sizes: Sequence[int], num_dims: int
) -> Partition | None:
    """Return the partition of a value whose dimension 0 is kept apart.

    Args:
        places: Where the axes are in the value with the dimension merged.
        sizes: The sizes that are merged into it.
        num_dims: How many dimensions the value has apart.
    """
    partition: list[Axis] = [None] * num_dims
    ends = [1, *itertools.accumulate(sizes, lambda a, b: a * b)][:-1]
    for axis, (dim, outer) in places.items():
        if dim == 0 and outer in ends:
            # Behind dimensions of size one, which nothing splits.
            index = max(i for i, end in enumerate(ends) if end == outer)
        elif dim > 0 and outer == 1:
            index = len(sizes) + dim - 1
        else:
            return None
        if partition[index] is not None:
            return None
        partition[index] = axis
    return tuple(partition)
