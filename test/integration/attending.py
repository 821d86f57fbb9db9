"""A model of two stages with `attention`, and how its heads are sharded."""

from typing import Any

import torch
from torch import Tensor, nn

import torch_xla_pp as xpp
from torch_xla_pp.mesh import presets

CONTEXT = presets.mix(presets.dp("data"), presets.cp("model"))
RULES = presets.mix(presets.dp("data"), presets.tp("model")) | xpp.AxisRules(
    parameters={
        "*.[qkv].weight": ("heads", "embed"),
        "*.out.weight": ("embed", "heads"),
    }
)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        layers = [nn.Linear(width, width, bias=False) for _ in range(4)]
        self.q, self.k, self.v, self.out = layers
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        def cut(y: Tensor, sequence: Any = None) -> Tensor:
            y = y.view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            return xpp.shard(y, "batch", "heads", sequence, "head_dim")

        mixed = xpp.attention(
            cut(self.q(x), "sequence"),
            cut(self.k(x)),
            cut(self.v(x)),
            is_causal=True,
            axes=("batch", "heads", "sequence", "head_dim"),
        )
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class Attending(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = (SelfAttention(width, heads) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(xpp.pipeline_yield(self.first(x)))


def attending(width: int = 16, heads: int = 4) -> Attending:
    """Return a model with equal values at each call."""
    torch.manual_seed(0)
    return Attending(width, heads)
