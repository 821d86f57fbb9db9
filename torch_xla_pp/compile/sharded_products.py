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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from torch_xla_pp import cpu, xla_compat
from torch_xla_pp.compile.mesh_parts import MeshParts, partition_text
from torch_xla_pp.mesh import Partition, axis_names, axis_of


class Factor(NamedTuple):
    """A factor of a product, of any dimensions.

    Attributes:
        value: The factor.
        partition: Which axes of the mesh split it, None if that is not known.
    """

    value: Tensor
    partition: Partition | None


class ProductCall(NamedTuple):
    """A product, see `xla_compat.product`.

    Attributes:
        left: The left factor.
        right: The right one.
        sums: Of each factor the dimensions that are summed over.
        batch: The dimensions of both factors that stay, the first ones.
        is_plain: Whether it is what the graph has, without dimensions kept apart.
    """

    left: Factor
    right: Factor
    sums: tuple[Sequence[int], Sequence[int]]
    batch: Sequence[int] = ()
    is_plain: bool = False

    @property
    def turned(self) -> "ProductCall":
        """The product with its factors in the other order."""
        return ProductCall(self.right, self.left, self.sums[::-1], self.batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedProducts:
    """How products run on each device's parts.

    Args:
        multiply: Multiplies one device's parts.
        mesh: How values are cut.
    """

    multiply: cpu.PartProduct
    mesh: MeshParts

    def product(self, call: "ProductCall") -> Tensor | None:
        """Multiply as `xla_compat.product` does; None for what is XLA's."""
        return self._result(call, None)

    def product_sum(self, total: Factor, call: "ProductCall") -> Tensor | None:
        """Add a product to a value, in its memory; None if that is XLA's."""
        return self._result(call, _Added(total, is_bias=False))

    def biased_product(self, bias: Factor, call: "ProductCall") -> Tensor | None:
        """Add a number for each column to a product; None if that is XLA's."""
        return self._result(call, _Added(bias, is_bias=True))

    def _result(self, call: "ProductCall", added: "_Added | None") -> Tensor | None:
        left, right = call.left, call.right
        plan = _plan(call)
        if plan is None or not self._divides(left, plan.left, right, plan.right):
            return None
        num_batch = len(call.batch)
        shape = (*left.value.shape[:num_batch], *plan.free_shape)
        partition: Partition = (*plan.left[:num_batch], *plan.free)
        if added is not None and not _fits(added, shape, partition, plan, num_batch):
            return None
        if plan.summed:
            axis = axis_of(plan.summed)
            shape = (self.mesh.local.axis_size(axis), *shape)
            partition = (axis, *partition)
        if not self.mesh.divides(shape, partition):
            return None
        part = self.multiply(
            self._parts(left, plan.left),
            self._parts(right, plan.right),
            self._sides(call, plan),
            self.mesh.part_shape(shape, partition),
            partition_text(shape, partition),
            added and cpu.Addend(self._added(added.value), added.is_bias),
        )
        if part is None:
            return None
        whole = self.mesh.leave(part, partition, shape, left.value.dtype)
        return whole.sum(0) if plan.summed else whole

    def _added(self, added: Factor) -> Tensor:
        assert added.partition is not None
        return self.mesh.enter(added.value, added.partition)

    def _parts(self, factor: Factor, partition: Partition) -> Tensor:
        """Return each device's part; a factor that is split otherwise moves first."""
        value = factor.value
        if partition != factor.partition:
            value = xla_compat.constrain(value, self.mesh.sharding(partition))
        return self.mesh.enter(value, partition)

    def _divides(
        self, left: Factor, of_left: Partition, right: Factor, of_right: Partition
    ) -> bool:
        is_left = self.mesh.divides(left.value.shape, of_left)
        return is_left and self.mesh.divides(right.value.shape, of_right)

    def _sides(self, call: "ProductCall", plan: "_Plan") -> cpu.ProductSides:
        first = self.mesh.part_shape(call.left.value.shape, plan.left)
        second = self.mesh.part_shape(call.right.value.shape, plan.right)
        batch = math.prod(first[: len(call.batch)])
        depth = math.prod(first[dim] for dim in call.sums[0])
        return cpu.ProductSides(
            batch=batch,
            rows=math.prod(first) // (batch * depth),
            depth=depth,
            columns=math.prod(second) // (batch * depth),
            is_left_turned=plan.is_left_turned,
            is_right_turned=plan.is_right_turned,
        )


class _Added(NamedTuple):
    value: Factor
    is_bias: bool


def _fits(
    added: _Added,
    shape: Sequence[int],
    partition: Partition,
    plan: "_Plan",
    num_batch: int,
) -> bool:
    """Return whether each device may add its part of a value to that of a product."""
    value = added.value
    if plan.summed:
        return False
    if not added.is_bias:
        return value.partition == partition and value.value.shape == tuple(shape)
    is_matrix = num_batch == 0 and plan.num_columns_dims == 1
    is_row = value.value.shape == tuple(shape[-1:])
    return is_matrix and is_row and value.partition == partition[-1:]


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
        num_columns_dims: How many dimensions of the result are those of the right one.
    """

    left: Partition
    right: Partition
    free: Partition
    free_shape: tuple[int, ...]
    summed: tuple[str, ...]
    is_left_turned: bool
    is_right_turned: bool
    num_columns_dims: int


def _plan(call: "ProductCall") -> _Plan | None:
    """Cut a product so that both factors' parts fit, None if nothing is known."""
    left, right, sums, num_batch = call.left, call.right, call.sums, len(call.batch)
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
        num_columns_dims=len(dims[1]),
    )


def _is_next(count: int, num_batch: int, summed: Sequence[int]) -> bool | None:
    """Return whether dimensions come next to the batch, None if neither nor last."""
    if list(summed) == list(range(count - len(summed), count)):
        return False
    return True if list(summed) == [num_batch + i for i in range(len(summed))] else None
