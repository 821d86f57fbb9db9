"""The rule by which sums, means and softmax are calls of `csrc/`, see `lowering`.

For CPU devices. Gradients of biases and of what normalizations scale and
shift are sums of columns; the statistics of a layer norm are means of rows.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from torch_xla_pp.compile.ops import wrapped
from torch_xla_pp.cpu import fits_own_ops, softmax, softmax_grad, total

_aten = torch.ops.aten
_SOFTMAX = (
    _aten._softmax.default,
    _aten._safe_softmax.default,
    _aten._log_softmax.default,
)
_SOFTMAX_GRADS = (
    _aten._softmax_backward_data.default,
    _aten._log_softmax_backward_data.default,
)
# XLA makes one loop of shorter sums, which it joins with what is around.
_MOST_OF_XLA = 32


def run_on_rows(
    node: fx.Node, values: Mapping[fx.Node, Any], _: object, /
) -> Tensor | None:
    """Run sums, means, softmax, its logarithm and their gradients of float32 values."""
    args: Any = node.args
    match node.target:
        case _aten.sum.dim_IntList | _aten.mean.dim if not node.kwargs:
            sums = _sums(values[args[0]], *args[1:])
            if sums is None or node.target is _aten.sum.dim_IntList:
                return sums
            return sums.div(_count(values[args[0]], args[1]))
        case kind if kind in _SOFTMAX and not node.kwargs:
            value = values[args[0]]
            is_safe = kind is _aten._safe_softmax.default
            is_log = kind is _aten._log_softmax.default
            # The third argument asks for another dtype.
            is_plain = len(args) < 3 or not args[2]
            if is_plain and _is_along_rows(value, args[1]):
                return softmax(value, is_safe=is_safe, is_log=is_log)
        case kind if kind in _SOFTMAX_GRADS:
            grad, output = values[args[0]], values[args[1]]
            is_log = kind is _aten._log_softmax_backward_data.default
            if args[3] == grad.dtype and _is_along_rows(grad, args[2]):
                return softmax_grad(grad, output, is_log=is_log)
    return None


def _sums(value: Tensor, dims: Any, keepdim: bool = False) -> Tensor | None:
    """Add up a value, None if XLA does that as well or these are no rows or columns."""
    if not fits_own_ops(value) or not value.dim():
        return None
    shape = tuple(value.shape)
    summed = _places(value, dims)
    if max((shape[dim] for dim in summed), default=0) <= _MOST_OF_XLA:
        return None
    is_summed = [dim in summed for dim, size in enumerate(shape) if size > 1]
    if is_summed == sorted(is_summed):
        is_of_columns = False
    elif is_summed == sorted(is_summed, reverse=True):
        is_of_columns = True
    else:
        return None
    kept = [
        1 if dim in summed else size
        for dim, size in enumerate(shape)
        if keepdim or dim not in summed
    ]
    sums = total(value, _count(value, dims), is_of_columns=is_of_columns)
    return sums.reshape(kept)


def _places(value: Tensor, dims: Any) -> set[int]:
    """Return the dimensions that are added up; none stated are all."""
    return set(wrapped(dims or range(value.dim()), value.dim()))


def _count(value: Tensor, dims: Any) -> int:
    """Return of how many elements each sum is."""
    return math.prod(value.shape[dim] for dim in _places(value, dims))


def _is_along_rows(value: Tensor, dim: int) -> bool:
    is_last = value.dim() > 0 and dim in (-1, value.dim() - 1)
    return is_last and fits_own_ops(value)
