"""Attention as one operation, whose kernel is chosen where a stage is compiled.

In a traced model it stays one operation, with one for its gradients. Stages for TPUs
call a kernel for both, see `compile.attention_kernel`, and those for CPUs functions of
`csrc/`, see `compile.attention_calls`; all other stages compute the plain operations
below, which define it. As in flash attention, two numbers of each row
are kept for the backward, and no probabilities. The operation's result has the heads
behind the length: so a layer reads it, and so it is kept, without a copy.

Source: Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with
IO-Awareness", NeurIPS 2022.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torch_xla_pp.graph.shard import axes_of

_NAME, _BACKWARD = "torch_xla_pp::attention", "torch_xla_pp::attention_backward"
_AXES = ("batch", "heads", None, "head_dim")
Three = tuple[Tensor, Tensor, Tensor]
Pin = Callable[[Tensor, Tensor], Tensor]

torch.library.define(
    _NAME,
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, "
    "float scale, str[] axes) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    _BACKWARD,
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask, "
    "Tensor output, Tensor sums, Tensor maxima, bool is_causal, float scale, "
    "str[] axes) -> (Tensor, Tensor, Tensor)",
)


def _free(scores: Tensor, query: Tensor) -> Tensor:
    return scores


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    axes: Sequence[str] = (),
    *,
    pin: Pin = _free,
) -> Three:
    """Compute attention; a row that sees no key has zeros.

    Args:
        query: `(batch, heads, length, head_dim)`.
        key: `(batch, heads, length of keys, head_dim)`.
        value: As the keys.
        mask: What a query sees of the keys, bool, of four dimensions; those but the
            last one may be of size one. None for all.
        is_causal: Whether a query sees only the keys up to its own place.
        scale: Factor of the scores.
        axes: The logical axes of the queries' dimensions.
        pin: Takes scores, `(batch, heads, length, length of keys)`, and the queries;
            returns the scores, on the devices where they are to be.

    Returns:
        The result, `(batch, length, heads, head_dim)`, and for each row of scores the
        sum of exponentials and the maximum.
    """
    scores = _scores(query, key, mask, is_causal, scale, pin)
    maxima = scores.amax(-1)
    weights = _weights(scores, maxima, mask)
    sums = weights.sum(-1)
    shares = _shares(weights, sums, mask).to(value.dtype)
    result = torch.matmul(shares, value).transpose(-3, -2).contiguous()
    return result, sums, maxima


def plain_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    output: Tensor,
    sums: Tensor,
    maxima: Tensor,
    is_causal: bool,
    scale: float,
    axes: Sequence[str] = (),
    *,
    pin: Pin = _free,
) -> Three:
    """Compute the gradients of queries, keys and values.

    Args:
        grad: That of the result, laid out as the result is.
        query: As in `plain_attention`, as is all that follows.
        key: The keys.
        value: The values.
        mask: What a query sees of the keys.
        output: The result.
        sums: Of exponentials, for each row of scores.
        maxima: Of the scores, likewise.
        is_causal: Whether a query sees only the keys up to its own place.
        scale: Factor of the scores.
        axes: The logical axes of the queries' dimensions.
        pin: Of scores, and of the gradients of their shares.
    """
    grad, output = grad.transpose(-3, -2), output.transpose(-3, -2)
    scores = _scores(query, key, mask, is_causal, scale, pin)
    exact = scores.dtype
    shares = _shares(_weights(scores, maxima, mask), sums, mask)
    of_value = torch.matmul(shares.to(grad.dtype).transpose(-2, -1), grad)
    of_shares = pin(torch.matmul(grad, value.transpose(-2, -1)).to(exact), query)
    along = (output.to(exact) * grad.to(exact)).sum(-1, keepdim=True)
    of_scores = (shares * (of_shares - along) * scale).to(query.dtype)
    return (
        torch.matmul(of_scores, key),
        torch.matmul(of_scores.transpose(-2, -1), query),
        of_value,
    )


def _scores(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    pin: Pin,
) -> Tensor:
    """Return the products of queries and keys, at least in float32."""
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = torch.matmul(query, key.transpose(-2, -1)).to(exact) * scale
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf)
    if is_causal:
        rows, columns = (
            torch.arange(size, device=query.device) for size in scores.shape[-2:]
        )
        scores = torch.where(rows.unsqueeze(1) >= columns, scores, -math.inf)
    return pin(scores, query)


def _weights(scores: Tensor, maxima: Tensor, mask: Tensor | None) -> Tensor:
    """Return exponentials of scores; zeros in rows that a mask hides."""
    if mask is not None:
        maxima = torch.where(maxima == -math.inf, 0.0, maxima)
    return torch.exp(scores - maxima.unsqueeze(-1))


def _shares(weights: Tensor, sums: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        sums = torch.where(sums == 0, 1.0, sums)
    return weights / sums.unsqueeze(-1)


def _fake(query: Tensor, *_: Any) -> Three:
    exact = torch.promote_types(query.dtype, torch.float32)
    row = query.new_empty(query.shape[:-1], dtype=exact)
    batch, heads, length, width = query.shape
    result = query.new_empty(batch, length, heads, width)
    return result, row, torch.empty_like(row)


def _fake_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> Three:
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Three) -> None:
    query, key, value, mask, *ctx.options = inputs
    result, sums, maxima = output
    ctx.mark_non_differentiable(sums, maxima)
    ctx.save_for_backward(query, key, value, mask, result, sums, maxima)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    found = ATTENTION_BACKWARD(grad, *ctx.saved_tensors, *ctx.options)
    return (*found, *[None] * 4)


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: Three) -> None:
    grad, query, key, value, mask, _, _, _, *ctx.options = inputs
    ctx.save_for_backward(grad, query, key, value, mask)
    ctx.num_others = len(inputs) - 4


def _backward_of_gradient(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    """Differentiate the gradients, as functions of what they are gradients of."""
    *saved, mask = ctx.saved_tensors

    def gradients(grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Three:
        given = query, key, value, mask
        kept = plain_attention(*given, *ctx.options)
        return plain_attention_backward(grad, *given, *kept, *ctx.options)

    _, pull = torch.func.vjp(gradients, *saved)
    return (*pull(grads), *[None] * ctx.num_others)


def _batched(
    function: Any, info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[Three, tuple[int, int, int]]:
    """Let vmap add a dimension in front: the plain operations accept any."""
    size = info.batch_size
    whole = [
        arg
        if not isinstance(arg, Tensor)
        else arg.expand(size, *arg.shape)
        if dim is None
        else arg.movedim(dim, 0)
        for arg, dim in zip(args, in_dims, strict=True)
    ]
    return function(*whole), (0, 0, 0)


def _flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    *outer, rows, width = query
    return int(4 * math.prod(outer) * rows * key[-2] * width)


def _backward_flops(grad: Any, *args: Any, **kwargs: Any) -> int:
    """Count five products; a forward has two."""
    return _flops(*args) * 5 // 2


torch.library.impl(_NAME, "CompositeExplicitAutograd", plain_attention)
torch.library.impl(_BACKWARD, "CompositeExplicitAutograd", plain_attention_backward)
torch.library.register_fake(_NAME, _fake)
torch.library.register_fake(_BACKWARD, _fake_backward)
torch.library.register_autograd(_NAME, _backward, setup_context=_keep)
torch.library.register_autograd(
    _BACKWARD, _backward_of_gradient, setup_context=_keep_gradient
)


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return _batched(plain_attention, info, in_dims, *args)


def _vmap_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return _batched(plain_attention_backward, info, in_dims, *args)


torch.library.register_vmap(_NAME, _vmap)
torch.library.register_vmap(_BACKWARD, _vmap_backward)

ATTENTION = torch.ops.torch_xla_pp.attention.default
ATTENTION_BACKWARD = torch.ops.torch_xla_pp.attention_backward.default
register_flop_formula(torch.ops.torch_xla_pp.attention)(_flops)
register_flop_formula(torch.ops.torch_xla_pp.attention_backward)(_backward_flops)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    axes: Sequence[str | None] = _AXES,
) -> Tensor:
    """Compute attention, by a kernel where the devices have one.

    The numbers are those of `scaled_dot_product_attention`. A stage for TPUs calls
    torch_xla's flash attention for it and for its gradient, on each device's part of
    batch and heads, if JAX is installed, and one for CPUs a function of this package;
    on other devices, and where these do not support the shapes, it is computed by
    products and exponentials.

    Args:
        query: `(batch, heads, length, head_dim)`.
        key: `(batch, heads, length of keys, head_dim)`, with the heads of the queries.
        value: As the keys.
        is_causal: Whether a query sees only the keys up to its own place.
        scale: Factor of the scores, None for the root of 1 / head_dim.
        axes: The logical axes of these dimensions, as for `shard`; those of length and
            head_dim must not be split, or the kernel is not called.

    Raises:
        ValueError: Shapes or dtypes do not match.

    Example:
        >>> mixed = attention(q, k, v, is_causal=True)
    """
    _check(query, key, value, axes)
    names = [name or "" for name in axes]
    return masked_attention(query, key, value, None, is_causal, scale, names)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    names: Sequence[str] = (),
) -> Tensor:
    """Call the operation; see `attention` for operands, and `plain_attention`.

    Args:
        query: The queries.
        key: The keys.
        value: The values.
        mask: What a query sees of the keys, None for all.
        is_causal: Whether a query sees only the keys up to its own place.
        scale: Factor of the scores, None for the root of 1 / head_dim.
        names: The logical axes of the queries' dimensions, none if not known.
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    options = mask, is_causal, float(factor), list(names)
    result: Tensor = ATTENTION(query, key, value, *options)[0]
    return result.transpose(1, 2)


def attention_axes(names: Any) -> tuple[str | None, ...]:
    """Return the logical axes that the operation was called with."""
    return axes_of(names)


def _check(
    query: Tensor, key: Tensor, value: Tensor, axes: Sequence[str | None]
) -> None:
    shapes = [tuple(x.shape) for x in (query, key, value)]
    sides = [(*shape[:2], *shape[3:]) for shape in shapes]
    is_alike = key.shape == value.shape and sides[0] == sides[1]
    if any(x.dim() != 4 for x in (query, key, value)) or not is_alike:
        raise ValueError(
            "attention: expected queries, keys and values of (batch, heads, length, "
            f"head_dim), alike but for the length of the queries, got {shapes}. Repeat "
            "the heads of keys and values if they have fewer."
        )
    dtypes = {x.dtype for x in (query, key, value)}
    if len(dtypes) > 1 or not query.is_floating_point():
        raise ValueError(
            "attention: expected one floating-point dtype, got "
            f"{', '.join(sorted(map(str, dtypes)))}. Convert them."
        )
    if len(axes) != 4:
        raise ValueError(
            f"attention: expected four logical axes, got {tuple(axes)}. Name each, or "
            "None."
        )
