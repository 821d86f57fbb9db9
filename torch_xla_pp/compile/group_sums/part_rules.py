"""Rules that make the parts of an operation's result, see `group_sums.gradient_parts`.

A rule takes the node of an operation. It returns the node of its parts, or None if it
has none: because its operand has none, or because the operation is used in a way that
is not linear.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from torch_xla_pp.compile.group_sums.batch_dims import (
    shape_of,
    summed,
)
from torch_xla_pp.compile.group_sums.gradient_parts import GradientParts, Rule
from torch_xla_pp.compile.group_sums.row_groups import PARTS, WHOLE
from torch_xla_pp.compile.ops import permutation, views, wrapped
from torch_xla_pp.graph import SHARD

_aten = torch.ops.aten


# Operations on one operand, number by number or place by place.


def _same(parts: GradientParts, node: fx.Node) -> fx.Node | None:
    return parts.of(node.all_input_nodes[0])


def _scaled(parts: GradientParts, node: fx.Node) -> fx.Node | None:
    found = parts.of(node.all_input_nodes[0])
    return found and parts.call(node, node.target, found, *node.args[1:], **node.kwargs)


def _reshaped(parts: GradientParts, node: fx.Node) -> fx.Node | None:
    found = parts.of(node.all_input_nodes[0])
    sizes = parts.sizes(shape_of(node))
    return found and parts.call(node, _aten.reshape.default, found, sizes)


def _expanded(parts: GradientParts, node: fx.Node) -> fx.Node | None:
    found = _aligned(parts, node, node.all_input_nodes[0])
    sizes = parts.sizes(shape_of(node))
    return found and parts.call(node, _aten.expand.default, found, sizes)


def _aligned(parts: GradientParts, node: fx.Node, operand: fx.Node) -> fx.Node | None:
    """Return an operand's parts, with as many dimensions as the result's parts have."""
    found, shape, count = parts.of(operand), shape_of(operand), len(shape_of(node))
    if found is None or len(shape) == count:
        return found
    sizes = parts.sizes([1] * (count - len(shape)) + list(shape))
    return parts.call(node, _aten.reshape.default, found, sizes)


def _permuted(parts: GradientParts, node: fx.Node) -> fx.Node | None:
    source = node.all_input_nodes[0]
    found = parts.of(source)
    order = [0, *(d + 1 for d in permutation(node, len(shape_of(source))))]
    return found and parts.call(node, _aten.permute.default, found, order)


def _cut(parts: GradientParts, node: fx.Node) -> fx.Node | None:
    """Take a part of one dimension."""
    args: Any = node.args
    found = parts.of(args[0])
    (dim,) = wrapped(args[1] if len(args) > 1 else 0, len(shape_of(args[0])))
    return found and parts.call(node, node.target, found, dim + 1, *args[2:])


def _uncut(parts: GradientParts, node: fx.Node) -> fx.Node | None:
    """Put a part of one dimension back between zeros."""
    args: Any = node.args
    found, sizes = parts.of(args[0]), parts.sizes(shape_of(node))
    (dim,) = wrapped(args[2], len(shape_of(node)))
    return found and parts.call(node, node.target, found, sizes, dim + 1, *args[3:])


# Operations on several operands.


def _zeros(parts: GradientParts, node: fx.Node) -> fx.Node | None:
    if node.target is _aten.full.default and node.args[1] != 0:
        return None
    return parts.call(node, _aten.new_zeros.default, node, parts.sizes(shape_of(node)))


def _joined(parts: GradientParts, node: fx.Node) -> fx.Node | None:
    args: Any = node.args
    found = [parts.of(source) for source in args[0]]
    (dim,) = wrapped(args[1] if len(args) > 1 else 0, len(shape_of(node)))
    return None if None in found else parts.call(node, node.target, found, dim + 1)


def _added(parts: GradientParts, node: fx.Node) -> fx.Node | None:
    if not all(isinstance(arg, fx.Node) for arg in node.args):
        return None
    args: Any = node.args
    left, right = (_aligned(parts, node, term) for term in args)
    if left is None or right is None:
        return None
    return parts.call(node, node.target, left, right, **node.kwargs)


def _multiplied(parts: GradientParts, node: fx.Node) -> fx.Node | None:
    """Multiply the parts of one factor by the other; divide only the first."""
    left, right = node.args
    if not isinstance(right, fx.Node):
        return _scaled(parts, node)
    orders = [(left, right), (right, left)]
    for factor, other in orders if node.target is _aten.mul.Tensor else orders[:1]:
        found = _aligned(parts, node, factor) if isinstance(factor, fx.Node) else None
        if found is not None:
            return parts.call(node, node.target, found, other, **node.kwargs)
    return None


# Operations that sum over the batch, or over other dimensions.


def _summed(parts: GradientParts, node: fx.Node) -> fx.Node | None:
    args: Any = node.args
    place, dims = parts.places.get(args[0]), summed(node, len(shape_of(args[0])))
    keepdim = len(args) > 2 and bool(args[2])
    if place is not None and place.dim in dims:
        target, at = parts.rows.sum, list(place)
        return parts.call(node, target, args[0], at, dims, keepdim, **node.kwargs)
    found, inner = parts.of(args[0]), [dim + 1 for dim in dims]
    return found and parts.call(
        node, _aten.sum.dim_IntList, found, inner, keepdim, **node.kwargs
    )


def _product(parts: GradientParts, node: fx.Node) -> fx.Node | None:
    """Cut a product of matrices whose sum goes over the batch."""
    operands: Any = node.args
    last = len(shape_of(operands[0])) - 1
    for operand, dim in zip(operands, (last, last - 1), strict=True):
        place = parts.places.get(operand)
        if place is not None and place.dim == dim:
            return parts.call(node, parts.rows.product, *operands, place.outer)
    return None


def _embedded(parts: GradientParts, node: fx.Node) -> fx.Node | None:
    args: Any = node.args
    grad, indices, *_, is_scaled_by_frequency = args
    if is_scaled_by_frequency:
        return None
    return _applied(parts, node, node, None, grad, [indices])


def _put(parts: GradientParts, node: fx.Node) -> fx.Node | None:
    """Add values to zeros, at places of the first dimensions."""
    args: Any = node.args
    zeros, indices, values, *rest = args
    listed = [index for index in indices if index is not None]
    is_plain = listed == indices[: len(listed)]
    is_plain = is_plain and len({shape_of(index) for index in listed}) == 1
    is_sum = rest == [True] and zeros.target in _FACTORIES
    if not is_plain or not is_sum or _zeros(parts, zeros) is None:
        return None
    return _applied(parts, node, node, None, values, listed)


def _taken(parts: GradientParts, node: fx.Node) -> fx.Node | None:
    """Take the gradient of a convolution's weight or bias."""
    args: Any = node.args
    source, item = args
    if source.target is not _aten.convolution_backward.default or item == 0:
        return None
    grad, value, *_ = source.args
    place = parts.places.get(grad)
    # Rows are in dimension 0; a sum over other dimensions is not a sum of parts.
    if place is None or place.dim != 0:
        return None
    return _applied(parts, node, source, item, grad, [value])


def _applied(
    parts: GradientParts,
    node: fx.Node,
    op: fx.Node,
    item: int | None,
    grad: fx.Node,
    others: Sequence[fx.Node],
) -> fx.Node | None:
    """Let each device run an operation that sums over the rows of a gradient.

    The gradient has rows if all other operands have; or it is a sum over the rows
    already, and each device runs the operation on its part of that sum.
    """
    place, own = parts.places.get(grad), [parts.places.get(n) for n in others]
    args: Any = op.args
    split: Mapping[fx.Node, int]
    if place is not None and place.outer == 1 and all(p == place for p in own):
        split = dict.fromkeys([grad, *others], place.dim)
    elif place is None and not any(own):
        found = parts.of(grad)
        if found is None:
            return None
        split = {found: PARTS}
        args = map_arg(args, lambda n: found if n is grad else n)
    else:
        return None
    operands: list[fx.Node] = []
    map_arg(args, operands.append)
    dims = [split.get(operand, WHOLE) for operand in operands]
    return parts.call(node, parts.rows.apply, op.target, item, dims, list(args))


_FACTORIES = (
    _aten.full.default,
    _aten.new_zeros.default,
    _aten.zeros.default,
    _aten.zeros_like.default,
)

RULES: Mapping[Any, Rule] = {
    **dict.fromkeys(_FACTORIES, _zeros),
    SHARD: _same,
    _aten.clone.default: _same,
    **dict.fromkeys(views("same"), _same),
    **dict.fromkeys(views("view", "squeeze"), _reshaped),
    **dict.fromkeys(views("expand"), _expanded),
    **dict.fromkeys(views("permute"), _permuted),
    **dict.fromkeys(views("select", "slice"), _cut),
    _aten._to_copy.default: _scaled,
    _aten.div.Scalar: _scaled,
    _aten.mul.Scalar: _scaled,
    _aten.neg.default: _scaled,
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
