"""Layer norm that does not merge dimensions.

PyTorch's layer norm for XLA devices is a batch norm over all rows as one dimension. If
both the batch and the sequence are split over devices, XLA has no sharding for that
dimension and gathers; here statistics are taken along the normalised dimensions alone.
As in eager, the input and the statistics are all that is kept for the backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Compute `torch.layer_norm`; statistics are at least float32."""
    dims = tuple(range(-len(normalized_shape), 0))
    return _LayerNorm.apply(x, weight, bias, dims, eps)[0]  # type: ignore[no-any-return, no-untyped-call]


class _LayerNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dims: tuple[int, ...],
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        exact = _exact(x)
        mean = exact.mean(dims, keepdim=True)
        variance = (exact - mean).square().mean(dims, keepdim=True)
        scale = torch.rsqrt(variance + eps)
        y = ((exact - mean) * scale).to(x.dtype)
        y = y if weight is None else y * weight
        return (y if bias is None else y + bias), mean, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, bias, ctx.dims, _ = inputs
        _, mean, scale = output
        ctx.mark_non_differentiable(mean, scale)
        ctx.save_for_backward(x, weight, bias, mean, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        dims = ctx.dims
        grad = _exact(grads[0])
        rows = tuple(range(grad.dim() - len(dims)))
        normal = (_exact(x) - mean) * scale
        scaled = grad if weight is None else grad * weight
        along = (scaled * normal).mean(dims, keepdim=True)
        x_grad = (scaled - scaled.mean(dims, keepdim=True) - normal * along) * scale
        return (
            x_grad.to(x.dtype),
            None if weight is None else _total(grad * normal, rows).to(weight.dtype),
            None if bias is None else _total(grad, rows).to(bias.dtype),
            None,
            None,
        )


def _total(value: Tensor, dims: tuple[int, ...]) -> Tensor:
    return value.sum(dims) if dims else value


def _exact(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))
