"""Each device's parts of the values of a graph, where these are known.

XLA cannot split a call over devices. So a call is made for one device's parts, in what
torch_xla calls a *manual region*: values enter it with a sharding, and results leave it
with one.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.axis_places import AxisPlaces, axis_places
from torch_xla_pp.compile.group_sums.batch_dims import shape_of
from torch_xla_pp.compile.group_sums.row_groups import RowGroups
from torch_xla_pp.compile.ops import views
from torch_xla_pp.graph import SHARD, axes_of
from torch_xla_pp.mesh import Axis, LocalMesh, LogicalAxes, Partition, axis_names

_MOST_DIMS = 5
_RESIZED = views("view", "expand")  # their second argument is the result's shape


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshParts:
    """How values are cut for the devices of a rank.

    Args:
        local: The devices.
        layout: Takes the axes that `shard` was called with; returns the partition, None
            for any.
        sharding: Returns torch_xla's sharding for a partition.
        partitions_of: Returns the partitions of values, None where these are not known.
    """

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
        return self.follow(graph, dict(zip(inputs, found, strict=True)))

    def follow(
        self, graph: fx.Graph, inputs: Mapping[fx.Node, Partition | None]
    ) -> AxisPlaces:
        """Find what the mesh's axes split in a graph, from what is known of inputs."""
        known = dict(inputs)
        for node in graph.find_nodes(op="call_function", target=SHARD):
            axes: Any = node.args[1]
            layout = self.layout(axes_of(axes))
            if layout is not None:
                known[node] = layout
        return axis_places(graph, known, self.local.axis_size)

    def enter(self, value: Tensor, partition: Partition) -> Tensor:
        """Return each device's part of a value; one that is split otherwise moves."""
        return xla_compat.to_shards(value, self.sharding(partition))

    def leave(
        self,
        part: Tensor,
        partition: Partition,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the value of which each device has a part."""
        return xla_compat.from_shards(part, self.sharding(partition), shape, dtype)

    def part_shape(self, shape: Sequence[int], partition: Partition) -> list[int]:
        """Return the shape of one device's part of a value."""
        return self.local.shard_shape(tuple(shape), partition)

    def divides(self, shape: Sequence[int], partition: Partition) -> bool:
        """Return whether a partition cuts a value into equal parts.

        torch_xla has no shardings of more than five dimensions.
        """
        is_known = len(shape) <= _MOST_DIMS
        return is_known and not self.local.faults(tuple(shape), partition)


class ValueParts:
    """How the values of a graph are split.

    Args:
        mesh: How values are cut.
        places: Where the mesh's axes are.

    Attributes:
        mesh: As given.
    """

    def __init__(self, mesh: MeshParts, places: AxisPlaces) -> None:
        self.mesh = mesh
        self._places = places
        self._graph: PartGraph | None = None

    @classmethod
    def of_run(
        cls,
        mesh: MeshParts,
        node: fx.Node,
        values: Mapping[fx.Node, Any],
        notes: dict[fx.Node, Any],
    ) -> "ValueParts":
        """Return those of a rule's run; noted with the graph's end."""
        end = next(iter(reversed(node.graph.nodes)))
        if end not in notes:
            notes[end] = cls(mesh, mesh.places(node.graph, values))
        found: ValueParts = notes[end]
        return found

    def partition(
        self, node: fx.Node, sizes: Sequence[int] = (), num_dims: int | None = None
    ) -> Partition | None:
        """Return the partition of a value, None if it is not known.

        Args:
            node: What makes it.
            sizes: The sizes that are merged into its dimension 0; the whole dimension
                if not given.
            num_dims: How many dimensions the value has with these apart.
        """
        places, shape = self._places.get(node), shape_of(node)
        if places is None:
            return None
        count = len(shape) if num_dims is None else num_dims
        return partition_at(places, sizes or shape[:1], count)

    def cut(self, node: fx.Node) -> Partition | None:
        """Return the partition of a tensor, None if it does not make equal parts."""
        partition, look = self.partition(node), node.meta.get("val")
        if partition is None or not isinstance(look, Tensor):
            return None
        return partition if self.mesh.divides(look.shape, partition) else None

    def text(self, node: fx.Node) -> str:
        """Tell apart values of equal parts."""
        partition = self.cut(node)
        return "" if partition is None else partition_text(shape_of(node), partition)

    def graph_of(self, graph: fx.Graph, values: Mapping[fx.Node, Any]) -> "PartGraph":
        """Return the graph for one device's parts, in a run of this one."""
        if self._graph is None:
            self._graph = PartGraph(self, graph, values)
        return self._graph


class UnknownPartError(LookupError):
    """It is not known how a value is split."""


class PartGraph(Mapping[fx.Node, Any]):
    """A copy of a graph for one device's parts, with their values by node.

    Its shapes are those of parts, and what views ask for, too.

    Args:
        parts: How the values of the graph are split.
        graph: The graph.
        values: What has run of it so far.

    Attributes:
        copies: The copy of each node.
        notes: What rules note about copies.
    """

    def __init__(
        self, parts: ValueParts, graph: fx.Graph, values: Mapping[fx.Node, Any]
    ) -> None:
        self.copies: dict[fx.Node, fx.Node] = {}
        self.notes: dict[fx.Node, Any] = {}
        self._mesh, self._whole = parts.mesh, values
        self._values: dict[fx.Node, Any] = {}
        self._origins: dict[fx.Node, fx.Node] = {}
        # No reference to `parts`, which has one to this: pending values must not
        # outlive the run.
        self._partitions: dict[fx.Node, Partition] = {}
        copied = fx.Graph()
        for node in graph.nodes:
            copy = _copied(copied, node, self.copies)
            self.copies[node], self._origins[copy] = copy, node
            partition = parts.cut(node)
            if partition is None:
                continue
            self._partitions[copy] = partition
            shape = parts.mesh.part_shape(shape_of(node), partition)
            dtype = node.meta["val"].dtype
            copy.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
            if node.target in _RESIZED:
                copy.update_arg(1, shape)

    def __getitem__(self, copy: fx.Node) -> Any:
        """Return one device's part of a value; what is no tensor as it is.

        Raises:
            UnknownPartError: It is not known how the value is split.
        """
        if copy not in self._values:
            value = self._whole[self._origins[copy]]
            if isinstance(value, Tensor):
                partition = self._partitions.get(copy)
                if partition is None:
                    raise UnknownPartError(copy.name)
                value = self._mesh.enter(value, partition)
            self._values[copy] = value
        return self._values[copy]

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self._origins)

    def __len__(self) -> int:
        return len(self._origins)

    def __contains__(self, copy: object) -> bool:
        return copy in self._partitions and self._origins[copy] in self._whole


def _copied(
    graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """Copy a node; each device takes its term of a sum per group of rows."""
    if getattr(node.target, "__func__", None) is not RowGroups.sum:
        return graph.node_copy(node, copies.__getitem__)
    source, _, dims, keepdim = node.args
    given = copies[source], dims, *([True] if keepdim else [])  # type: ignore[index]
    return graph.call_function(torch.ops.aten.sum.dim_IntList, given, node.kwargs)


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


def partition_text(shape: Sequence[int], partition: Partition) -> str:
    """Tell apart values of equal parts."""
    axes = ["+".join(axis_names(axis)) for axis in partition]
    return "x".join(
        f"{size}/{axis}" if axis else str(size)
        for size, axis in zip(shape, axes, strict=True)
    )
