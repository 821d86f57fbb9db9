"""The rule by which layer norms are calls of `csrc/`, see `lowering`.

For CPU devices. A layer norm is several operations in a graph, those of
`layer_norm.py`, of which some may be in other programs. It is found by its first one,
the mean, and its gradients by their last ones. What the call replaces runs as well; if
nothing else reads it, XLA leaves it out.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torch_xla_pp.compile.ops import wrapped
from torch_xla_pp.cpu import fits_own_ops, norm, norm_factor_grad, norm_grad

_aten = torch.ops.aten
_ADD, _SUB = _aten.add.Tensor, _aten.sub.Tensor
_MUL, _MEAN = _aten.mul.Tensor, _aten.mean.dim


def run_norms(
    node: fx.Node, values: Mapping[fx.Node, Any], notes: dict[fx.Node, Any], /
) -> Tensor | None:
    """Run layer norms of float32 values and their gradients."""
    noted = notes.get(node)
    if isinstance(noted, Tensor):
        return noted
    if node.target is _MEAN:
        return _norm(node, values, notes)
    if node.target is _MUL:
        grad = _input_grad(node, values)
        return None if grad is None else norm_grad(*grad)
    if node.target is _ADD:
        return _added_grad(node, values)
    if node.target is _aten.sum.dim_IntList:
        return _factor_grad(node, values)
    return None


def _norm(
    node: fx.Node, values: Mapping[fx.Node, Any], notes: dict[fx.Node, Any]
) -> Tensor | None:
    """Run the layer norm that a mean is the first operation of; note its results."""
    x: Any = node.args[0]
    if not fits_own_ops(values[x]) or not _keeps_last(node, values[x]):
        return None
    found = next(_scales(node), None)
    if found is None:
        return None
    scale, epsilon = found
    normal = next(_normals(node, scale), None)
    if normal is None:
        return None
    shape = values[x].shape[_num_rows_dims(node, values[x]) :]
    last, factor = _next(normal, _MUL, values, shape)
    last, shift = _next(last, _ADD, values, shape)
    own = [None if other is None else values[other] for other in (factor, shift)]
    result, mean, by = norm(values[x], math.prod(shape), epsilon, *own)
    notes[last] = result
    notes[scale] = by.reshape(node.meta["val"].shape)
    return mean.reshape(node.meta["val"].shape)


def _scales(mean: fx.Node) -> Iterator[tuple[fx.Node, float]]:
    """Yield what scales rows of this mean, and what is added to their variance."""
    for centred in _users(mean, _SUB, mean.args[0], mean):
        for square in _users(centred, _aten.pow.Tensor_Scalar, centred, 2):
            for variance in _users(square, _MEAN, square, *mean.args[1:]):
                for safe in _users(variance, _ADD, variance, None):
                    epsilon = safe.args[1]
                    if isinstance(epsilon, float):
                        for scale in _users(safe, _aten.rsqrt.default, safe):
                            yield scale, epsilon


def _normals(mean: fx.Node, scale: fx.Node) -> Iterator[fx.Node]:
    """Yield the normalized values."""
    for centred in _users(mean, _SUB, mean.args[0], mean):
        yield from _users(centred, _MUL, centred, scale)


def _next(
    node: fx.Node, target: Any, values: Mapping[fx.Node, Any], shape: torch.Size
) -> tuple[fx.Node, fx.Node | None]:
    """Return what is next, and what a value is multiplied with or added to for it."""
    for user in _users(node, target, node, None):
        other: Any = user.args[1]
        is_there = isinstance(other, fx.Node) and other in values
        if is_there and fits_own_ops(values[other]) and values[other].shape == shape:
            return user, other
    return node, None


class _Normal(NamedTuple):
    """Normalized values, (x - mean) * scale."""

    x: fx.Node
    mean: fx.Node
    scale: fx.Node


def _normal_of(node: Any, values: Mapping[fx.Node, Any]) -> _Normal | None:
    """Return what normalized values are made of; None if they are none."""
    product = _operands(node, _MUL)
    centred = _operands(product[0], _SUB) if product else None
    if product is None or centred is None:
        return None
    found = _Normal(*centred, product[1])
    if not all(isinstance(part, fx.Node) for part in found):
        return None
    x, mean, scale = (values[part] for part in found)
    is_by_row = mean.shape == scale.shape and _is_of_rows(mean.shape, x.shape)
    return found if is_by_row and all(map(fits_own_ops, (x, mean, scale))) else None


def _is_of_rows(shape: torch.Size, whole: torch.Size) -> bool:
    """Return whether a shape has ones in place of the last dimensions of another."""
    count = len(whole)
    kept = ((*whole[:i], *[1] * (count - i)) for i in range(count))
    return any(tuple(shape) == one for one in kept)


class _InputGrad(NamedTuple):
    """The gradient of the input of a layer norm, as `norm_grad` takes it."""

    grad: Tensor
    x: Tensor
    mean: Tensor
    scale: Tensor
    factor: Tensor | None


def _added_grad(node: fx.Node, values: Mapping[fx.Node, Any]) -> Tensor | None:
    """Add the gradient of a norm's input to that of what is beside the norm."""
    operands = _operands(node, _ADD)
    for other, term in (operands, operands[::-1]) if operands else ():
        if not isinstance(other, fx.Node) or not isinstance(term, fx.Node):
            continue
        if len(term.users) > 1 or not fits_own_ops(values[other]):
            continue
        grad = _input_grad(term, values)
        if grad is not None and values[other].shape == grad.x.shape:
            return norm_grad(*grad, values[other])
    return None


def _input_grad(node: fx.Node, values: Mapping[fx.Node, Any]) -> _InputGrad | None:
    """Return the gradient of the input, if a product is its last operation.

    (scaled - mean of scaled - normal * mean of scaled * normal) * scale
    """
    outer = _operands(node, _MUL)
    difference = _operands(outer[0], _SUB) if outer else None
    middle = _operands(difference[0], _SUB) if difference else None
    along = _operands(difference[1], _MUL) if difference else None
    if outer is None or middle is None or along is None:
        return None
    scaled, normal = middle[0], along[0]
    found = _normal_of(normal, values)
    if found is None or outer[1] is not found.scale:
        return None
    x, mean, scale = (values[part] for part in found)
    if not _is_mean(middle[1], scaled, found, values):
        return None
    if not isinstance(along[1], fx.Node) or along[1].target is not _MEAN:
        return None
    if _operands(along[1].args[0], _MUL) != (scaled, normal):
        return None
    if not _is_mean(along[1], along[1].args[0], found, values):
        return None
    if not fits_own_ops(values[scaled]) or values[scaled].shape != x.shape:
        return None
    parts = _operands(scaled, _MUL)
    if parts is not None and all(isinstance(part, fx.Node) for part in parts):
        grad, factor = (values[part] for part in parts)
        shape = x.shape[x.dim() - factor.dim() :] if factor.dim() else None
        is_factor = (
            fits_own_ops(grad) and fits_own_ops(factor) and factor.shape == shape
        )
        count = x.numel() // mean.numel()
        if is_factor and factor.numel() == count and grad.shape == x.shape:
            return _InputGrad(grad, x, mean, scale, factor)
    return _InputGrad(values[scaled], x, mean, scale, None)


def _factor_grad(node: fx.Node, values: Mapping[fx.Node, Any]) -> Tensor | None:
    """Run the gradient of the factor: the sum of grad * normal over all rows."""
    args: Any = node.args
    product = _operands(args[0], _MUL)
    found = _normal_of(product[1], values) if product else None
    if product is None or found is None or len(args) > 2 or node.kwargs:
        return None
    grad, x = product[0], values[found.x]
    if not isinstance(grad, fx.Node) or values[grad].shape != x.shape:
        return None
    rows = wrapped(args[1], x.dim())
    count = len(rows)
    if sorted(rows) != list(range(count)) or not fits_own_ops(values[grad]):
        return None
    if values[found.mean].numel() != math.prod(x.shape[:count]):
        return None
    result = norm_factor_grad(values[grad], *(values[part] for part in found))
    return result.reshape(x.shape[count:])


def _is_mean(
    node: Any, of: Any, normal: _Normal, values: Mapping[fx.Node, Any]
) -> bool:
    """Return whether a node is the mean of a value along the same dimensions."""
    if not isinstance(node, fx.Node) or node.target is not _MEAN:
        return False
    is_same = node.args[0] is of and values[node].shape == values[normal.mean].shape
    return is_same and _keeps_last(node, values[of])


def _keeps_last(node: fx.Node, value: Tensor) -> bool:
    """Return whether a mean is along last dimensions, which it keeps."""
    args: Any = node.args
    if len(args) < 3 or not args[2] or node.kwargs:
        return False
    count = value.dim()
    dims = sorted(wrapped(args[1], count))
    return bool(dims) and dims == list(range(count - len(dims), count))


def _num_rows_dims(node: fx.Node, value: Tensor) -> int:
    dims: Any = node.args[1]
    return value.dim() - len(dims)


def _operands(node: Any, target: Any) -> tuple[Any, Any] | None:
    """Return the operands of an operation of two, None if it is another one."""
    if not isinstance(node, fx.Node) or node.target is not target or node.kwargs:
        return None
    left, right = node.args
    return left, right


def _users(node: fx.Node, target: Any, *args: Any) -> Iterator[fx.Node]:
    """Yield the operations on a node with just these operands; None stands for any."""
    for user in node.users:
        is_alike = user.target is target and len(user.args) == len(args)
        if (
            is_alike
            and not user.kwargs
            and all(
                want is None
                or want is got
                or (not isinstance(want, fx.Node) and want == got)
                for want, got in zip(args, user.args, strict=True)
            )
        ):
            yield user
