"""Attention of models that call PyTorch's function, as one operation.

PyTorch computes it on XLA devices by products and a softmax, and keeps all
probabilities for the backward, whose number grows with the square of the length. Here
it is the operation of `graph.attention`, which keeps two numbers of each row.
"""

import torch
from torch import Tensor
from torch.nn import functional

from torch_xla_pp.graph import masked_attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `functional.scaled_dot_product_attention`.

    With dropout, a mask of numbers or other shapes than `attention` takes, PyTorch's
    way is left.
    """
    mask, is_mask = attn_mask, attn_mask is None
    if attn_mask is not None and query.dim() == 4:
        mask = _mask(attn_mask, query, key)
        is_mask = mask is not None and not is_causal
    if dropout_p or not is_mask or not _is_taken(query, key, value, enable_gqa):
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    count = query.shape[1] // key.shape[1]
    key, value = (
        x.repeat_interleave(count, 1) if count > 1 else x for x in (key, value)
    )
    return masked_attention(query, key, value, mask, is_causal, scale)


def _mask(given: Tensor, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a mask of four dimensions, the last one whole; None for another one."""
    whole = (*query.shape[:3], key.shape[2])
    if given.dtype != torch.bool or given.dim() > 4:
        return None
    shape = (*[1] * (4 - given.dim()), *given.shape)
    if any(size not in (1, own) for size, own in zip(shape, whole, strict=True)):
        return None
    return given.view(shape).expand(*shape[:3], whole[3])


def _is_taken(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Return whether `attention` computes it, maybe of repeated keys and values."""
    given = (query, key, value)
    if any(x.dim() != 4 or not x.numel() for x in given) or key.shape != value.shape:
        return False
    if not query.is_floating_point() or any(x.dtype != query.dtype for x in given):
        return False
    # Autocast would change the dtypes.
    if torch.is_autocast_enabled("xla") or torch.is_autocast_enabled("cpu"):
        return False
    heads, other_heads = query.shape[1], key.shape[1]
    is_alike = heads == other_heads or (enable_gqa and heads % other_heads == 0)
    return is_alike and (query.shape[0], query.shape[3]) == (key.shape[0], key.shape[3])
