"""The rule by which ranks of several CPU devices call libraries on each device's parts.

Rules for one device know nothing of several. Here they run on a copy of the graph whose
values are one device's parts. What is known here is which operations may be computed
part by part: those whose results are split as their operands are, and sums over what is
split, of which XLA adds up what the devices found. If it is not known how an operand is
split, the operation is XLA's.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torch_xla_pp import cpu, xla_compat
from torch_xla_pp.compile.group_sums.batch_dims import shape_of, summed
from torch_xla_pp.compile.group_sums.row_groups import RowGroups
from torch_xla_pp.compile.lowering import LoweringRule
from torch_xla_pp.compile.mesh_parts import (
    MeshParts,
    PartGraph,
    UnknownPartError,
    ValueParts,
)
from torch_xla_pp.compile.ops import wrapped
from torch_xla_pp.graph import ATTENTION, ATTENTION_BACKWARD
from torch_xla_pp.mesh import Axis, Partition, axis_names, axis_of

_aten = torch.ops.aten
_BY_ELEMENT = (_aten.gelu.default, _aten.gelu_backward.default)
# Which argument is the dimension.
_SOFTMAX: Mapping[Any, int] = {
    _aten._softmax.default: 1,
    _aten._safe_softmax.default: 1,
    _aten._log_softmax.default: 1,
    _aten._softmax_backward_data.default: 2,
    _aten._log_softmax_backward_data.default: 2,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PartCalls:
    """The rule by which rules for one device run on parts.

    Args:
        rules: The rules for one device.
        mesh: How values are cut.
    """

    rules: Sequence[LoweringRule]
    mesh: MeshParts

    def __call__(
        self, node: fx.Node, values: Mapping[fx.Node, Any], notes: dict[fx.Node, Any], /
    ) -> Any | None:
        """Run what may be computed part by part; None for all else."""
        parts = ValueParts.of_run(self.mesh, node, values, notes)
        graph = parts.graph_of(node.graph, values)
        copy = graph.copies[node]
        is_noted = graph.notes.get(copy) is not None
        results = _noted(node, parts) if is_noted else part_results(node, parts)
        if results is None:
            return None
        # What tells calls apart.
        shown = (node, *node.all_input_nodes)
        with cpu.calling_on_parts(".".join(map(parts.text, shown))):
            found = self._run(copy, graph)
        if found is None:
            return None
        given = [found] if isinstance(found, Tensor) else list(found)
        pairs = list(zip(given, results, strict=True))
        if not all(self._fits(part, result) for part, result in pairs):
            return None
        whole = [self._whole(part, result) for part, result in pairs]
        return whole[0] if isinstance(found, Tensor) else tuple(whole)

    def _run(self, copy: fx.Node, graph: PartGraph) -> Any | None:
        """Run an operation of the copied graph, None if no rule applies."""
        try:
            for rule in self.rules:
                found = rule(copy, graph, graph.notes)
                if found is not None:
                    return found
        except UnknownPartError:
            pass
        return None

    def _fits(self, part: Tensor, result: "_Result") -> bool:
        expected = self.mesh.part_shape(result.shape, result.partition)
        return list(part.shape) == expected and self.mesh.divides(*self._layout(result))

    def _layout(self, result: "_Result") -> tuple[tuple[int, ...], Partition]:
        """Return shape and partition, with terms in the first dimension."""
        if result.terms is None:
            return result.shape, result.partition
        count = self.mesh.local.axis_size(result.terms)
        return (count, *result.shape), (result.terms, *result.partition)

    def _whole(self, part: Tensor, result: "_Result") -> Tensor:
        """Return the value of which each device has a part, or a term."""
        shape, partition = self._layout(result)
        if result.terms is not None:
            part = part.unsqueeze(0)
        part = xla_compat.manual(part)
        whole = self.mesh.leave(part, partition, shape, torch.float32)
        return whole.sum(0) if result.is_added else whole


class _Result(NamedTuple):
    """How a result is split.

    Attributes:
        shape: Its shape.
        partition: Its partition.
        terms: The axis each of whose devices has a term of it, None for none.
        is_added: Whether the terms are added up; if not they are put one behind the
            other in a new first dimension.
    """

    shape: tuple[int, ...]
    partition: Partition
    terms: Axis = None
    is_added: bool = False


_Layout = Callable[[fx.Node, ValueParts], list[_Result] | None]


def part_results(node: fx.Node, parts: ValueParts) -> list[_Result] | None:
    """Return how an operation's results are split if it is computed part by part.

    Args:
        node: The operation.
        parts: How the values of its graph are split.

    Returns:
        One for each result, None if that is not known or may not be done.
    """
    layout = _LAYOUTS.get(getattr(node.target, "__func__", node.target))
    return None if layout is None else layout(node, parts)


def _noted(node: fx.Node, parts: ValueParts) -> list[_Result] | None:
    """Split a result as it is known to be."""
    partition = parts.cut(node)
    return None if partition is None else [_Result(shape_of(node), partition)]


def _alike(node: fx.Node, parts: ValueParts) -> list[_Result] | None:
    """Split a result as all of its operands are, which have its shape."""
    splits = {parts.cut(x) for x in (node, *node.all_input_nodes)}
    return _noted(node, parts) if len(splits) == 1 else None


def _whole_along(
    node: fx.Node, parts: ValueParts, source: Any, dims: Collection[int]
) -> list[_Result] | None:
    """Split a result as it is known to be, if nothing splits dimensions of another."""
    of_source = parts.cut(source)
    if of_source is None or any(of_source[dim] for dim in dims):
        return None
    return _noted(node, parts)


def _softmax(node: fx.Node, parts: ValueParts) -> list[_Result] | None:
    dim: Any = node.args[_SOFTMAX[node.target]]
    found = _whole_along(node, parts, node, wrapped(dim, len(shape_of(node))))
    return found and _alike(node, parts)


def _joined(node: fx.Node, parts: ValueParts) -> list[_Result] | None:
    """Split values that are put one behind the other along what is not split."""
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    return _whole_along(node, parts, node, wrapped(dim, len(shape_of(node))))


def _product(node: fx.Node, parts: ValueParts) -> list[_Result] | None:
    """Split a product of elements with one number for several of them.

    As the last operation of a layer norm's gradient it stands for means along what the
    number is one for.
    """
    shape = shape_of(node)
    for operand in node.all_input_nodes:
        own = shape_of(operand)
        if len(own) == len(shape) and own != shape:
            pairs = enumerate(zip(own, shape, strict=True))
            dims = [dim for dim, (size, whole) in pairs if size != whole]
            return _whole_along(node, parts, node, dims)
    return None


def _mean(node: fx.Node, parts: ValueParts) -> list[_Result] | None:
    source: Any = node.args[0]
    return _whole_along(node, parts, source, summed(node, len(shape_of(source))))


def _sum(node: fx.Node, parts: ValueParts) -> list[_Result] | None:
    source: Any = node.args[0]
    of_source, partition = parts.cut(source), parts.cut(node)
    if of_source is None or partition is None:
        return None
    gone = _axes_of(of_source, summed(node, len(of_source)))
    return [_Result(shape_of(node), partition, axis_of(gone), bool(gone))]


def _group_sums(node: fx.Node, parts: ValueParts) -> list[_Result] | None:
    """Split sums per group of rows, which each device has of its own rows."""
    source: Any = node.args[0]
    place: Any = node.args[1]
    dims: Any = node.args[2]
    of_source, shape = parts.cut(source), shape_of(source)
    if of_source is None or node.kwargs or place[1] != 1:
        return None
    gone = _axes_of(of_source, dims)
    rows: Any = node.target.__self__  # type: ignore[union-attr]
    if not gone or axis_of(gone) != of_source[place[0]]:
        return None
    # A value inside of a stage may be split over other axes than its batch outside.
    if parts.mesh.local.axis_size(axis_of(gone)) != rows.size:
        return None
    left = [
        (1, None) if dim in dims else (shape[dim], of_source[dim])
        for dim in range(len(shape))
        if node.args[3] or dim not in dims
    ]
    sizes, partition = tuple(x for x, _ in left), tuple(x for _, x in left)
    return [_Result(sizes, partition, axis_of(gone))]


def _axes_of(partition: Partition, dims: Collection[int]) -> tuple[str, ...]:
    return tuple(name for dim in dims for name in axis_names(partition[dim]))


def _attention(node: fx.Node, parts: ValueParts) -> list[_Result] | None:
    """Split attention by batch and heads."""
    given: Any = node.args
    is_forward = node.target is ATTENTION
    heads, mask = (given[:3], given[3]) if is_forward else (given[1:4], given[4])
    split = parts.cut(heads[0])
    if split is None or any(split[2:]) or any(parts.cut(x) != split for x in heads):
        return None
    batch, head, *_ = split
    rows: Partition = (batch, head, None)
    turned: Partition = (batch, None, head, None)
    if mask is not None:
        expected = tuple(
            None if size == 1 else axis
            for size, axis in zip(shape_of(mask), split, strict=True)
        )
        if parts.cut(mask) != expected:
            return None
    shape = shape_of(heads[0])
    if is_forward:
        result = shape[0], shape[2], shape[1], shape[3]
        return [_Result(result, turned), *[_Result(shape[:3], rows)] * 2]
    others = (given[0], turned), (given[5], turned), (given[6], rows), (given[7], rows)
    if any(parts.cut(x) != partition for x, partition in others):
        return None
    return [_Result(shape_of(x), split) for x in heads]


_LAYOUTS: Mapping[Any, _Layout] = {
    **dict.fromkeys(_BY_ELEMENT, _alike),
    **dict.fromkeys(_SOFTMAX, _softmax),
    **dict.fromkeys((ATTENTION, ATTENTION_BACKWARD), _attention),
    _aten.cat.default: _joined,
    _aten.clone.default: _noted,
    _aten.mean.dim: _mean,
    _aten.mul.Tensor: _product,
    _aten.sum.dim_IntList: _sum,
    RowGroups.sum: _group_sums,
}
