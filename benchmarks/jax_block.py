"""The block of `gpt.py` in JAX, for scripts that may run where PyTorch is missing."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Weights = dict[str, Any]


def norm(x: Any) -> Any:
    """Return rows of mean 0 and variance 1."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def block(heads: int, x: Any, weights: Weights) -> Any:
    """Apply the block to `(B, L, width)`."""
    rows, length, width = x.shape
    projected = (norm(x) * weights["scale_1"] + weights["shift_1"]) @ weights["qkv"]
    by_head = (projected + weights["qkv_bias"]).reshape(rows, length, heads, -1)
    q, k, v = jnp.split(by_head, 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    mixing = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", mixing, v).reshape(x.shape)
    x = x + mixed @ weights["out"] + weights["out_bias"]
    hidden = (norm(x) * weights["scale_2"] + weights["shift_2"]) @ weights["up"]
    hidden = jax.nn.gelu(hidden + weights["up_bias"], approximate=False)
    return x + hidden @ weights["down"] + weights["down_bias"]
