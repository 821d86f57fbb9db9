"""The models that `accelerator_table.py` compiles: small, all dimensions with names.

Each block says by `xpp.shard` what its values are, so that every preset can be used.
Sizes are multiples of what four devices split, and of the tiles of a device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.nn import functional as F

import torch_xla_pp as xpp

WIDTH, HEADS, VOCAB, ROWS, LENGTH, EXPERTS = 256, 8, 512, 8, 128, 8

RULES = xpp.AxisRules(
    parameters={
        "*.[qkv].weight": ("heads", "embed"),
        "*.out.weight": ("embed", "heads"),
        "*.up.weight": ("mlp", "embed"),
        "*.down.weight": ("embed", "mlp"),
        "embed.weight": ("vocab", "embed"),
        "head.weight": ("vocab", "embed"),
    }
)
LLAMA_RULES = xpp.AxisRules(
    parameters={
        "*.q_proj.weight": ("heads", "embed"),
        "*.[kv]_proj.weight": ("kv_heads", "embed"),
        "*.o_proj.weight": ("embed", "heads"),
        "*.gate_proj.weight": ("mlp", "embed"),
        "*.up_proj.weight": ("mlp", "embed"),
        "*.down_proj.weight": ("embed", "mlp"),
        "*.embed_tokens.weight": ("vocab", "embed"),
        "lm_head.weight": ("vocab", "embed"),
    },
    activations={
        "*.q_proj": ("batch", "sequence", "heads"),
        "*.[kv]_proj": ("batch", "key_sequence", "kv_heads"),
        "*.o_proj": ("batch", "norm_sequence", "embed"),
        "*.up_proj": ("batch", "sequence", "mlp"),
        "*.down_proj": ("batch", "norm_sequence", "embed"),
        "lm_head": ("batch", "sequence", "vocab"),
    },
)
EXPERT_RULES = xpp.AxisRules(
    parameters={
        "*.up": ("expert", "embed", "mlp"),
        "*.down": ("expert", "mlp", "embed"),
        "*.gate.weight": (None, "embed"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Example:
    """A model of two stages, or one program with two stages inside.

    Args:
        model: The model, without values.
        args: Arguments of a microbatch.
        loss_fn: Takes what it returns and the target.
        target: Example of a target.
        rules: Logical axes of its parameters.
        split_spec: Where it is cut, unless it has marks.
        mesh: Axes of its own, beside those of a preset.
    """

    model: nn.Module
    args: tuple[Any, ...]
    loss_fn: Callable[..., Tensor]
    target: Tensor
    rules: xpp.AxisRules
    split_spec: Mapping[str, SplitPoint] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)


class Block(nn.Module):
    """A block of a transformer, `(B, L, WIDTH)` to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, and apply the MLP."""
        rows, length, _ = x.shape
        shape = (rows, length, HEADS, -1)
        y = self.norm_1(x)
        q = xpp.shard(self.q(y).view(shape), "batch", "sequence", "heads", "head_dim")
        keys = ("batch", "key_sequence", "kv_heads", "head_dim")
        k, v = (xpp.shard(part(y).view(shape), *keys) for part in (self.k, self.v))
        mixed = F.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (q, k, v)), is_causal=True
        )
        mixed = xpp.shard(mixed, "batch", "heads", "sequence", "head_dim")
        y = self.out(mixed.transpose(1, 2).reshape(x.shape))
        x = xpp.shard(x + y, "batch", "norm_sequence", "embed")
        hidden = xpp.shard(self.up(self.norm_2(x)), "batch", "sequence", "mlp")
        y = self.down(F.gelu(hidden))
        return xpp.shard(x + y, "batch", "norm_sequence", "embed")


class Gpt(nn.Module):
    """Two blocks, a stage each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.first, self.second = Block(), Block()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        y = self.first(xpp.shard(self.embed(x), "batch", "norm_sequence", "embed"))
        y = self.second(xpp.pipeline_yield(y))
        return xpp.shard(self.head(y), "batch", "sequence", "vocab")


class Experts(nn.Module):
    """Experts, to each of which go the tokens `(T, WIDTH)` that its gate likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.zeros(EXPERTS, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.zeros(EXPERTS, 2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """An expert has room for twice its share; tokens without room pass by."""
        tokens = self.norm(x)
        room = 2 * x.shape[0] // EXPERTS
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        wanted = F.one_hot(chosen, EXPERTS)
        place = (wanted.cumsum(0) * wanted).sum(-1) - 1
        slot = F.one_hot(place.clamp(max=room), room + 1)[:, :room]
        sent = (wanted[:, :, None] * slot[:, None, :]).to(x.dtype)
        inside = torch.einsum("tes,tw->esw", sent, tokens)
        inside = xpp.shard(inside, "expert", None, "embed")
        hidden = xpp.shard(F.gelu(inside @ self.up), "expert", None, "mlp")
        outside = xpp.shard(hidden @ self.down, "expert", None, "embed")
        back = torch.einsum("tes,esw->tw", sent * weight[:, None, None], outside)
        return xpp.shard(x + back, "batch", "embed")


class Mixture(nn.Module):
    """Two layers of experts, a stage each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Experts(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        return self.second(xpp.pipeline_yield(self.first(x)))


def gpt() -> Example:
    """Return a GPT of two blocks."""
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long, device="meta")
    return Example(
        model=_without_values(Gpt),
        args=(tokens,),
        loss_fn=lambda y, target: F.cross_entropy(y.flatten(0, 1), target.flatten()),
        target=tokens,
        rules=RULES,
    )


def llama() -> Example:
    """Return a Llama of transformers from its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long, device="meta")
    return Example(
        model=_without_values(lambda: LlamaForCausalLM(config)),
        args=(tokens,),
        loss_fn=llama_loss,
        target=tokens,
        rules=LLAMA_RULES,
        split_spec={"model.layers.1": SplitPoint.BEGINNING},
    )


def llama_loss(output: Any, target: Tensor) -> Tensor:
    """Return the cross-entropy of a Llama's logits."""
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def moe() -> Example:
    """Return a mixture of experts."""
    tokens = torch.zeros(ROWS * LENGTH, WIDTH, device="meta")
    return Example(
        model=_without_values(Mixture),
        args=(tokens,),
        loss_fn=F.mse_loss,
        target=tokens,
        rules=EXPERT_RULES,
    )


def spmd() -> Example:
    """Return two blocks as a pipeline inside one program."""
    with torch.device("meta"):
        piped = xpp.spmd_pipeline(
            [Block(), Block()],
            num_stages=2,
            num_microbatches=2,
            axes=("batch", "norm_sequence", "embed"),
        )
    inner = {
        name: ("stage", None, None, *axes)
        for name, axes in RULES.parameters.items()
        if name.startswith("*")
    }
    x = torch.zeros(ROWS, LENGTH, WIDTH, device="meta")
    return Example(
        model=piped,
        args=(x,),
        loss_fn=F.mse_loss,
        target=x,
        # The first pattern that matches counts.
        rules=xpp.AxisRules(parameters=inner) | piped.axis_rules("stage"),
        mesh={"stage": 2},
    )


def _without_values(make: Callable[[], nn.Module]) -> nn.Module:
    with xpp.deferred_init():
        return make()


EXAMPLES: Mapping[str, Callable[[], Example]] = {
    "GPT": gpt,
    "Llama": llama,
    "MoE": moe,
    "spmd_pipeline": spmd,
}
