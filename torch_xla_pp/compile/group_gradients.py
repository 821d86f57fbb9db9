"""Gradients of parameters as sums per group of rows.

A gradient is a sum over the rows of a microbatch, most often in its last operations. If
rows are split over devices, these have to add up, after each microbatch. So this pass
replaces a gradient by its *parts*: a value with a first dimension of one entry per
group of rows, whose sum over that dimension is the gradient. The parts of many
microbatches are added up without any exchange.

It goes back from a gradient through linear operations to the operations that sum over
the batch, and cuts these into groups. The law: parts add up to the gradient whatever
the module computes, since both kinds of operations are known one by one. At any other
operation it gives up, and that parameter's gradient stays what it was.

Source: that data-parallel gradients are best reduced once a step, after the loop over
microbatches, is in section 5.2.1 of the JaxPP paper (Xhebraj et al., Scaling Deep
Learning Training with MPMD Pipeline Parallelism, 2024).
"""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_arg

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.batch_dims import (
    Place,
    batch_places,
    permutation,
    shape_of,
    summed,
    wrapped,
)
from torch_xla_pp.compile.export import JointGraph
from torch_xla_pp.compile.row_groups import PARTS, WHOLE, RowGroups
from torch_xla_pp.graph import SHARD

_aten = torch.ops.aten


class Grouping(NamedTuple):
    """Say how gradients are summed up per group of rows.

    Attributes:
        rows: The groups.
        dims: Role of an input or tangent → the dimension in which it has the batch.
        sums: Role of a parameter → how the sums of its gradient lie; those that are
            left out keep one sum.
    """

    rows: RowGroups
    dims: Mapping[str, int]
    sums: Mapping[str, xla_compat.OpSharding]


def group_gradients(joint: JointGraph, grouping: Grouping) -> dict[str, str]:
    """Replace gradients in a joint graph by their parts.

    Args:
        joint: Changed in place.
        grouping: Which gradients, and the groups.

    Returns:
        Role → why not, for the parameters whose gradient stays what it is.
    """
    known = {
        node: Place(grouping.dims[role])
        for node, role in joint.roles.items()
        if role in grouping.dims
    }
    graph = joint.graph.graph
    rewrite = _Rewrite(
        joint, grouping.rows, batch_places(graph, known, grouping.rows.size)
    )
    refused: dict[str, str] = {}
    for role, grad in joint.parameter_grads.items():
        if role not in grouping.sums:
            refused[role] = "the parameter is split over the batch axis"
            continue
        parts = rewrite.parts(grad)
        if parts is None:
            refused[role] = f"{rewrite.stopped[grad]} is not cut into groups of rows"
        else:
            joint.parameter_grads[role] = parts
    return refused


class _Rewrite:
    """Add the parts of values to a graph."""

    def __init__(
        self, joint: JointGraph, rows: RowGroups, places: Mapping[fx.Node, Place]
    ) -> None:
        self._joint = joint
        self._graph = joint.graph.graph
        self._known: dict[fx.Node, fx.Node | None] = {}
        self._at: fx.Node | None = None
        self.rows = rows
        self.places = places
        # Where the way back from a value ended.
        self.stopped: dict[fx.Node, str] = {}

    def parts(self, node: fx.Node) -> fx.Node | None:
        """Return the parts of a value, None if they are not known."""
        if node not in self._known:
            rule = _RULES.get(node.target) if _is_float(node) else None
            found = None if rule is None else rule(self, node)
            self._known[node] = found
            if found is None:
                reasons = (self.stopped.get(n) for n in node.all_input_nodes)
                inner = next(filter(None, reasons), None) if rule else None
                self.stopped[node] = inner or str(node.target)
        return self._known[node]

    def call(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add an operation that computes parts of `node`, right behind it."""
        with self._graph.inserting_before(self._behind(node)):
            made = self._graph.call_function(target, args, kwargs)
        made.meta["parts_of"] = node
        if node in self._joint.regions:
            self._joint.regions[made] = self._joint.regions[node]
        return made

    def _behind(self, node: fx.Node) -> fx.Node:
        behind = node.next
        while behind.meta.get("parts_of") is node:
            behind = behind.next
        return behind

    def reshaped(
        self, node: fx.Node, parts: fx.Node, shape: Sequence[int], count: int
    ) -> fx.Node:
        """Return parts of a value of `shape` as those of one of `count` dimensions."""
        if len(shape) == count:
            return parts
        ones = [1] * (count - len(shape))
        sizes = [self.rows.size, *ones, *shape]
        return self.call(node, _aten.reshape.default, parts, sizes)


_Rule = Callable[[_Rewrite, fx.Node], fx.Node | None]


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _shape(node: Any) -> tuple[int, ...]:
    return shape_of(node) or ()


def _same(rewrite: _Rewrite, node: fx.Node) -> fx.Node | None:
    return rewrite.parts(node.all_input_nodes[0])


def _scaled(rewrite: _Rewrite, node: fx.Node) -> fx.Node | None:
    """Apply an operation that takes each number by itself, and is linear."""
    parts = rewrite.parts(node.all_input_nodes[0])
    if parts is None:
        return None
    return rewrite.call(node, node.target, parts, *node.args[1:], **node.kwargs)


def _reshaped(rewrite: _Rewrite, node: fx.Node) -> fx.Node | None:
    parts = rewrite.parts(node.all_input_nodes[0])
    sizes = [rewrite.rows.size, *_shape(node)]
    return parts and rewrite.call(node, _aten.reshape.default, parts, sizes)


def _expanded(rewrite: _Rewrite, node: fx.Node) -> fx.Node | None:
    source, shape = node.all_input_nodes[0], _shape(node)
    parts = rewrite.parts(source)
    if parts is None:
        return None
    parts = rewrite.reshaped(node, parts, _shape(source), len(shape))
    sizes = [rewrite.rows.size, *shape]
    return rewrite.call(node, _aten.expand.default, parts, sizes)


def _permuted(rewrite: _Rewrite, node: fx.Node) -> fx.Node | None:
    source = node.all_input_nodes[0]
    parts = rewrite.parts(source)
    order = [0, *(d + 1 for d in permutation(node, len(_shape(source))))]
    return parts and rewrite.call(node, _aten.permute.default, parts, order)


def _cut(rewrite: _Rewrite, node: fx.Node) -> fx.Node | None:
    """Take a part of one dimension."""
    source = node.all_input_nodes[0]
    parts = rewrite.parts(source)
    dim = node.args[1] if len(node.args) > 1 else 0
    (place,) = wrapped(dim, len(_shape(source)))  # type: ignore[arg-type]
    rest = node.args[2:]
    return parts and rewrite.call(node, node.target, parts, place + 1, *rest)


def _uncut(rewrite: _Rewrite, node: fx.Node) -> fx.Node | None:
    """Put a part of one dimension back between zeros."""
    source, _, dim, *rest = node.args
    parts = rewrite.parts(source)  # type: ignore[arg-type]
    (place,) = wrapped(dim, len(_shape(node)))  # type: ignore[arg-type]
    sizes = [rewrite.rows.size, *_shape(node)]
    return parts and rewrite.call(node, node.target, parts, sizes, place + 1, *rest)


def _joined(rewrite: _Rewrite, node: fx.Node) -> fx.Node | None:
    parts = [rewrite.parts(source) for source in node.args[0]]  # type: ignore[union-attr, arg-type]
    (dim,) = wrapped(node.args[1] if len(node.args) > 1 else 0, len(_shape(node)))  # type: ignore[arg-type]
    if None in parts:
        return None
    return rewrite.call(node, node.target, parts, dim + 1)


def _zeros(rewrite: _Rewrite, node: fx.Node) -> fx.Node | None:
    if node.target is _aten.full.default and node.args[1] != 0:
        return None
    sizes = [rewrite.rows.size, *_shape(node)]
    return rewrite.call(node, _aten.new_zeros.default, node, sizes)


def _added(rewrite: _Rewrite, node: fx.Node) -> fx.Node | None:
    if not all(isinstance(arg, fx.Node) for arg in node.args):
        return None
    terms = []
    for term in node.all_input_nodes:
        parts = rewrite.parts(term)
        if parts is None:
            return None
        count = len(_shape(node))
        terms.append(rewrite.reshaped(node, parts, _shape(term), count))
    left, right = terms if len(terms) > 1 else terms * 2
    return rewrite.call(node, node.target, left, right, **node.kwargs)


def _multiplied(rewrite: _Rewrite, node: fx.Node) -> fx.Node | None:
    """Multiply the parts of one factor by the other; divide only the first."""
    left, right = node.args
    if not isinstance(right, fx.Node):
        return _scaled(rewrite, node)
    count, is_product = len(_shape(node)), node.target is _aten.mul.Tensor
    for factor, other in ((left, right), (right, left))[: 1 + is_product]:
        if isinstance(factor, fx.Node):
            parts = rewrite.parts(factor)
            if parts is not None:
                parts = rewrite.reshaped(node, parts, _shape(factor), count)
                return rewrite.call(node, node.target, parts, other, **node.kwargs)
    return None


def _summed(rewrite: _Rewrite, node: fx.Node) -> fx.Node | None:
    source: Any = node.args[0]
    place = rewrite.places.get(source)
    dims = summed(node, len(_shape(source)))
    keepdim = len(node.args) > 2 and bool(node.args[2])
    if node.kwargs:
        return None
    if place is not None and place.dim in dims:
        target = rewrite.rows.sum
        return rewrite.call(node, target, source, list(place), dims, keepdim)
    parts = rewrite.parts(source)
    inner = [dim + 1 for dim in dims]
    return parts and rewrite.call(node, _aten.sum.dim_IntList, parts, inner, keepdim)


def _product(rewrite: _Rewrite, node: fx.Node) -> fx.Node | None:
    """Cut a product of matrices whose sum goes over the batch."""
    left, right = node.args
    last = len(_shape(left)) - 1
    places = rewrite.places
    found = [places.get(left), places.get(right)]  # type: ignore[arg-type]
    inner = [
        place.outer
        for place, dim in zip(found, (last, last - 1), strict=True)
        if place is not None and place.dim == dim
    ]
    if not inner:
        return None
    return rewrite.call(node, rewrite.rows.product, left, right, inner[0])


def _embedded(rewrite: _Rewrite, node: fx.Node) -> fx.Node | None:
    grad, indices, *rest = node.args
    *_, is_scaled_by_frequency = rest
    if is_scaled_by_frequency:
        return None
    return _applied(rewrite, node, node, None, [grad], [indices])


def _put(rewrite: _Rewrite, node: fx.Node) -> fx.Node | None:
    """Add values to zeros at places that indices tell."""
    zeros, indices, values, *rest = node.args
    listed = [index for index in indices if index is not None]  # type: ignore[union-attr]
    is_plain = listed == list(indices)[: len(listed)]  # type: ignore[arg-type]
    shapes = {_shape(index) for index in listed}
    is_sum = bool(rest) and rest[0] is True
    is_zero = isinstance(zeros, fx.Node) and zeros.target in _FACTORIES
    if not (is_plain and is_sum and is_zero and len(shapes) == 1):
        return None
    if _zeros(rewrite, zeros) is None:  # type: ignore[arg-type]
        return None
    return _applied(rewrite, node, node, None, [values], listed)


def _taken(rewrite: _Rewrite, node: fx.Node) -> fx.Node | None:
    """Take the gradient of a convolution's weight or bias."""
    source, item = node.args
    if source.target is not _aten.convolution_backward.default or item == 0:  # type: ignore[union-attr]
        return None
    grad, value, *_ = source.args  # type: ignore[union-attr]
    place = rewrite.places.get(grad)  # type: ignore[arg-type]
    # Rows are in dimension 0; others are no sum of parts.
    if place is None or place.dim != 0:
        return None
    return _applied(rewrite, node, source, item, [grad], [value])  # type: ignore[arg-type]


def _applied(
    rewrite: _Rewrite,
    node: fx.Node,
    op: fx.Node,
    item: int | None,
    grads: Sequence[Any],
    others: Sequence[Any],
) -> fx.Node | None:
    """Let each device run an operation that sums over the rows of a gradient.

    The gradient has rows where all other operands have them, or it is a sum over the
    rows already, of which the operation takes the parts.
    """
    (grad,) = grads
    place, own = rewrite.places.get(grad), [rewrite.places.get(n) for n in others]
    args: Any = op.args
    if place is not None and place.outer == 1 and all(p == place for p in own):
        split = dict.fromkeys([grad, *others], place.dim)
    elif place is None and not any(own):
        parts = rewrite.parts(grad)
        if parts is None:
            return None
        split = {parts: PARTS}
        args = map_arg(args, lambda n: parts if n is grad else n)
    else:
        return None
    operands: list[fx.Node] = []
    map_arg(args, operands.append)
    dims = [split.get(operand, WHOLE) for operand in operands]
    return rewrite.call(node, rewrite.rows.apply, op.target, item, dims, list(args))


_FACTORIES: Collection[Any] = (
    _aten.full.default,
    _aten.new_zeros.default,
    _aten.zeros.default,
    _aten.zeros_like.default,
)

_RULES: dict[Any, _Rule] = {
    **dict.fromkeys(_FACTORIES, _zeros),
    SHARD: _same,
    _aten.alias.default: _same,
    _aten.clone.default: _same,
    _aten.detach.default: _same,
    _aten._to_copy.default: _scaled,
    _aten.div.Scalar: _scaled,
    _aten.mul.Scalar: _scaled,
    _aten.neg.default: _scaled,
    _aten.squeeze.default: _reshaped,
    _aten.squeeze.dim: _reshaped,
    _aten.squeeze.dims: _reshaped,
    _aten.unsqueeze.default: _reshaped,
    _aten.view.default: _reshaped,
    _aten._unsafe_view.default: _reshaped,
    _aten.expand.default: _expanded,
    _aten.permute.default: _permuted,
    _aten.t.default: _permuted,
    _aten.transpose.int: _permuted,
    _aten.select.int: _cut,
    _aten.slice.Tensor: _cut,
    _aten.select_backward.default: _uncut,
    _aten.slice_backward.default: _uncut,
    _aten.cat.default: _joined,
    _aten.stack.default: _joined,
    _aten.add.Tensor: _added,
    _aten.sub.Tensor: _added,
    _aten.div.Tensor: _multiplied,
    _aten.mul.Tensor: _multiplied,
    _aten.sum.default: _summed,
    _aten.sum.dim_IntList: _summed,
    _aten.bmm.default: _product,
    _aten.mm.default: _product,
    _aten.embedding_dense_backward.default: _embedded,
    _aten.index_put.default: _put,
    operator.getitem: _taken,
}
