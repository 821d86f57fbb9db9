"""Operations that stages compute in terms of others, each with its reason.

torch_xla 2.9 computes some operations wrongly and others not at all. Two tables list
what replaces them; `docs/operators.md` lists what was tried. An entry can go when
torch_xla has been fixed, which `test/ops` shows.

* `DECOMPOSITIONS` replaces operations of the joint graph, those of gradients included.
* `IN_AUTOGRAD` replaces operations before their gradient is taken, for those whose
  gradient is not computed by operations that XLA has. The same is done to composite
  operations that torch_xla implements without a gradient.

Most of them are PyTorch's own decompositions.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from torch_xla_pp import xla_compat
from torch_xla_pp.graph import (
    ATTENTION,
    ATTENTION_BACKWARD,
    SCORES_OF,
    plain_attention,
    plain_attention_backward,
)

_aten = torch.ops.aten
_logger = logging.getLogger(__name__)


class Decomposition(NamedTuple):
    """The replacement of an operation.

    Attributes:
        function: Takes its arguments; may return NotImplemented to leave the operation
            as it is.
        reason: What is wrong with torch_xla's implementation.
    """

    function: Callable[..., Any]
    reason: str


_ON_HOST = "torch_xla runs it on the host"
_KINK = "torch_xla's gradient at the kinks is that of one side"


def _dropout(
    x: Tensor, probability: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    if train is False or probability == 0.0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if probability == 1.0:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = torch.rand_like(x, dtype=torch.float32) >= probability
    return x * mask * (1.0 / (1.0 - probability)), mask


def _scaled_sum(bias: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return (bias if beta == 1 else bias * beta) + product


def _addmm(
    bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    if beta == 1 and alpha == 1:
        return NotImplemented
    return _scaled_sum(bias, torch.mm(left, right), beta, alpha)


def _baddbmm(
    bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    return _scaled_sum(bias, torch.bmm(left, right), beta, alpha)


def _addbmm(
    bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _scaled_sum(bias, torch.bmm(left, right).sum(0), beta, alpha)


def _addmv(
    bias: Tensor, matrix: Tensor, vector: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _scaled_sum(bias, torch.mv(matrix, vector), beta, alpha)


def _sum(
    x: Tensor,
    dims: Sequence[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    if dims or not x.dim():
        return NotImplemented
    return x.sum(tuple(range(x.dim())), keepdim=keepdim, dtype=dtype)


def _norm(
    x: Tensor,
    order: float = 2,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the norm of a vector, by the definition."""
    x = x if dtype is None else x.to(dtype)
    size = x.abs()
    along = tuple(dims or range(x.dim()))
    if not along:
        return size.clone() if order != 0 else (x != 0).to(x.dtype)
    if order == math.inf:
        return size.amax(along, keepdim=keepdim)
    if order == -math.inf:
        return size.amin(along, keepdim=keepdim)
    if order == 0:
        return (x != 0).to(x.dtype).sum(along, keepdim=keepdim)
    if order == 1:
        return size.sum(along, keepdim=keepdim)
    if order == 2:
        return x.square().sum(along, keepdim=keepdim).sqrt()
    return size.pow(order).sum(along, keepdim=keepdim).pow(1.0 / order)


def _norm_of_all(x: Tensor, order: float = 2) -> Tensor:
    return _norm(x, order)


def _fill(x: Tensor, value: Tensor) -> Tensor:
    return value.to(x.device, x.dtype).expand(x.shape).clone()


def _fmax(left: Tensor, right: Tensor) -> Tensor:
    return torch.where((left >= right) | right.isnan(), left, right)


def _fmin(left: Tensor, right: Tensor) -> Tensor:
    return torch.where((left <= right) | right.isnan(), left, right)


def _hypot(left: Tensor, right: Tensor) -> Tensor:
    """Return the length of the hypotenuse; only numbers up to 1 are squared."""
    left, right = left.abs(), right.abs()
    longer, shorter = torch.maximum(left, right), torch.minimum(left, right)
    ratio = torch.where(longer > 0, shorter / longer, 0.0)
    return longer * torch.sqrt(1.0 + ratio * ratio)


def _exp2(x: Tensor) -> Tensor:
    return torch.exp(x * math.log(2.0))


def _angle(x: Tensor) -> Any:
    if x.is_complex():
        return NotImplemented
    return torch.where(x.isnan(), x, torch.where(x < 0, math.pi, 0.0).to(x.dtype))


def _complex(real: Tensor, imaginary: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(real.shape, imaginary.shape)  # type: ignore[no-untyped-call]
    pairs = torch.stack([real.expand(shape), imaginary.expand(shape)], -1)
    return torch.view_as_complex(pairs.contiguous())


def _polar(size: Tensor, angle: Tensor) -> Tensor:
    return _complex(size * angle.cos(), size * angle.sin())


def _zeros(size: Sequence[int], **kwargs: Any) -> Tensor:
    return torch.zeros(size, **kwargs)


def _copysign(x: Tensor, sign: Tensor) -> Tensor:
    is_negative = (sign < 0) | ((sign == 0) & (sign.reciprocal() < 0))
    return torch.where(is_negative, -x.abs(), x.abs())


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.to(x.dtype).expand(x.shape).clone()


def _vdot(left: Tensor, right: Tensor) -> Any:
    return NotImplemented if left.is_complex() else (left * right).sum()


def _as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor:
    """Read a value by its strides in memory, which XLA's values do not have."""
    stored, _ = _memory(x)
    if not offset and tuple(size) == tuple(x.shape):
        kept = [dim for dim, count in enumerate(size) if count > 1]
        if all(stride[dim] == x.stride(dim) for dim in kept):
            return x.clone()
    places = _places(x, size, stride, offset)
    return stored.reshape(-1).index_select(0, places).view(tuple(size))


def _as_strided_scatter(
    x: Tensor,
    new: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | None = None,
) -> Tensor:
    stored, order = _memory(x)
    places = _places(x, size, stride, offset)
    written = stored.reshape(-1).index_copy(0, places, new.reshape(-1))
    back = [order.index(dim) for dim in range(x.dim())]
    return written.view(stored.shape).permute(back)


def _memory(x: Tensor) -> tuple[Tensor, list[int]]:
    """Return a value with its dimensions in the order of memory, and that order."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    stored = x.permute(order)
    if stored.is_contiguous() and x.storage_offset() == 0:
        return stored, order
    raise NotImplementedError(
        "aten.as_strided: expected a value that fills its memory, got one of shape "
        f"{list(x.shape)} and strides {list(x.stride())}"
    )


def _places(
    x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> Tensor:
    """Return the places in memory of a strided view, of one dimension."""
    places = torch.full((1,), int(offset or 0), dtype=torch.int64, device=x.device)
    for count, step in zip(size, stride, strict=True):
        along = torch.arange(count, device=x.device) * step
        places = (places.unsqueeze(1) + along).reshape(-1)
    return places


def _cdist(x: Tensor, y: Tensor, order: float, mode: int | None = None) -> Tensor:
    gaps = x.unsqueeze(-2) - y.unsqueeze(-3)
    distances: Tensor = torch.linalg.vector_norm(gaps, order, -1)
    return distances


def _adaptive_avg_pool(x: Tensor, size: Sequence[int]) -> Tensor:
    """Average over parts of each dimension, one dimension after the other."""
    for place, count in enumerate(size):
        dim = x.dim() - len(size) + place
        x = _averages(x, dim, count)
    return x


def _averages(x: Tensor, dim: int, count: int) -> Tensor:
    """Split a dimension into `count` parts, which may overlap, and average each."""
    size = x.shape[dim]
    if count == 1:
        return x.mean(dim, keepdim=True)
    if size % count == 0:
        parts = x.reshape(*x.shape[:dim], count, -1, *x.shape[dim + 1 :])
        return parts.mean(dim + 1)
    ends = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
    means = [x.narrow(dim, a, b - a).mean(dim, keepdim=True) for a, b in ends]
    return torch.cat(means, dim)


class _Hinges(TorchFunctionMode):
    """A mode in which clamps have a gradient of 0 at their kinks."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.clamp_min and args[1] == 0:
            return args[0].relu()
        if function is torch.clamp and len(args) == 3:
            return functional.hardtanh(*args)
        return function(*args, **(kwargs or {}))


def _hinged(function: Callable[..., Any]) -> Callable[..., Any]:
    def with_hinges(*args: Any, **kwargs: Any) -> Any:
        with _Hinges():
            return function(*args, **kwargs)

    return with_hinges


def _of_torch(reason: str, operations: Iterable[Any]) -> dict[Any, Decomposition]:
    """Return PyTorch's decompositions of operations."""
    found = get_decompositions(list(operations))
    return {op: Decomposition(function, reason) for op, function in found.items()}


def _own(reason: str, functions: Mapping[Any, Any]) -> dict[Any, Decomposition]:
    return {op: Decomposition(function, reason) for op, function in functions.items()}


DECOMPOSITIONS: Mapping[Any, Decomposition] = {
    **_of_torch(
        "torch_xla keeps the biased variance as the running one",
        [
            _aten._native_batch_norm_legit_functional,
            _aten._native_batch_norm_legit.no_stats,
            _aten.native_batch_norm_backward,
        ],
    ),
    **_own(
        "torch_xla scales by 1/p in place of 1/(1-p), and its mask is of floats",
        {_aten.native_dropout.default: _dropout},
    ),
    **_of_torch(
        "torch_xla takes the result for the input, or the other way round",
        [_aten.elu_backward.default],
    ),
    **_of_torch(
        _KINK,
        [
            _aten.hardtanh_backward.default,
            _aten.hardswish_backward.default,
            _aten.hardsigmoid_backward.default,
        ],
    ),
    **_own(
        "torch_xla sums over nothing where no dimensions are given, torch over all",
        {_aten.sum.dim_IntList: _sum},
    ),
    **_own(
        "torch_xla has no infinite orders, and runs others on the host",
        {
            _aten.norm.Scalar: _norm_of_all,
            _aten.norm.ScalarOpt_dim: _norm,
        },
    ),
    **_of_torch(
        "torch_xla returns the input",
        [_aten.pixel_shuffle.default, _aten.pixel_unshuffle.default],
    ),
    **_own("torch_xla writes into the operand", {_aten.copy.default: _copy}),
    **_of_torch("torch_xla aborts on a value without elements", [_aten.roll.default]),
    **_own(
        "torch_xla does not broadcast",
        {
            _aten.clamp_min.Tensor: torch.maximum,
            _aten.clamp_max.Tensor: torch.minimum,
        },
    ),
    **_own(
        f"{_ON_HOST} with factors",
        {
            _aten.addmm.default: _addmm,
            _aten.addmv.default: _addmv,
            _aten.addbmm.default: _addbmm,
        },
    ),
    **_own(
        _ON_HOST,
        {
            _aten._efficientzerotensor.default: _zeros,
            _aten.angle.default: _angle,
            _aten.copysign.Tensor: _copysign,
            _aten.exp2.default: _exp2,
            _aten.fill.Tensor: _fill,
            _aten.fmax.default: _fmax,
            _aten.fmin.default: _fmin,
            _aten.hypot.default: _hypot,
            _aten.vdot.default: _vdot,
        },
    ),
    **_of_torch(
        _ON_HOST,
        [
            _aten.channel_shuffle.default,
            _aten.col2im.default,
            _aten.glu_backward.default,
            _aten.huber_loss.default,
            _aten.huber_loss_backward.default,
            _aten.im2col.default,
            _aten.linalg_cross.default,
            _aten.logaddexp.default,
            _aten.logaddexp2.default,
            _aten.logit_backward.default,
            _aten.nansum.default,
            _aten.renorm.default,
            _aten.round.decimals,
            _aten.sinc.default,
            _aten.special_entr.default,
            _aten.special_xlog1py.default,
            _aten.unfold_backward.default,
            _aten.unfold_copy.default,
            _aten.unfold.default,
        ],
    ),
    **_own(
        "torch_xla's values have no strides",
        {
            _aten.as_strided.default: _as_strided,
            _aten.as_strided_scatter.default: _as_strided_scatter,
        },
    ),
    **_of_torch("torch_xla makes constants on the host", [_aten.unsafe_split.Tensor]),
    **_own(
        "not all devices have a kernel",
        {
            ATTENTION: plain_attention,
            ATTENTION_BACKWARD: plain_attention_backward,
        },
    ),
}
"""Operation of the joint graph → its replacement."""

IN_AUTOGRAD: Mapping[Any, Decomposition] = {
    **_own(f"{_ON_HOST}, or its gradient", {_aten._cdist_forward.default: _cdist}),
    **_own(_ON_HOST, {_aten.complex.default: _complex, _aten.polar.default: _polar}),
    **_of_torch(_ON_HOST, [_aten._weight_norm_interface.default]),
    **_own(
        f"{_ON_HOST} unless parts are equal",
        {
            _aten._adaptive_avg_pool2d.default: _adaptive_avg_pool,
            _aten._adaptive_avg_pool3d.default: _adaptive_avg_pool,
        },
    ),
    **_own(
        f"{_ON_HOST}, and PyTorch's decomposition has gradients at kinks",
        {
            op: _hinged(function)
            for op, function in get_decompositions(
                [
                    _aten.grid_sampler_2d.default,
                    _aten.multi_margin_loss.default,
                    _aten.multilabel_margin_loss_forward.default,
                ]
            ).items()
        },
    ),
}
"""Operation → its replacement before gradients are taken."""


def functions_in_graph(
    stays: Callable[..., bool] | None = None,
) -> dict[Any, Callable[..., Any]]:
    """Return operation of the joint graph → function; those used are logged.

    Args:
        stays: Takes the arguments of attention, or of its gradient; returns whether it
            stays one operation. If not, its scores are marked, see
            `compile.query_rows`. None for no marks.
    """
    found = {op: _logged(op, entry) for op, entry in DECOMPOSITIONS.items()}
    if stays is not None:
        for op in (ATTENTION, ATTENTION_BACKWARD):
            found[op] = _unless(stays, partial(found[op], pin=SCORES_OF))
    return found


def functions_in_autograd() -> dict[Any, Callable[..., Any]]:
    """Return operation → function before gradients are taken; likewise."""
    return {op: _logged(op, entry) for op, entry in _in_autograd().items()}


def reasons() -> dict[str, str]:
    """Return the names of all operations that are decomposed, and why."""
    entries = {**DECOMPOSITIONS, **_in_autograd()}
    return {str(op): entry.reason for op, entry in entries.items()}


def _in_autograd() -> dict[Any, Decomposition]:
    composites = {
        op: Decomposition(op.decompose, "torch_xla has no gradient of it")
        for op in xla_compat.composites_without_gradient()
    }
    return {**composites, **IN_AUTOGRAD}


def _unless(
    stays: Callable[..., bool], function: Callable[..., Any]
) -> Callable[..., Any]:
    def unless_it_stays(*args: Any) -> Any:
        return NotImplemented if stays(*args) else function(*args)

    return unless_it_stays


def _logged(op: Any, entry: Decomposition) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        result = entry.function(*args, **kwargs)
        if result is not NotImplemented:
            _logger.debug("%s is decomposed: %s", op, entry.reason)
        return result

    return function
