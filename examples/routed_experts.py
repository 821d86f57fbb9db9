"""Blocks of experts of transformers with fixed shapes, for XLA and torch.export.

One learns to replace a block that loops over its experts, with shapes that depend on
the routing, by one that computes the same: an expert has room for a number of tokens,
by default for all. `mixtral_experts.py` trains a model that has been changed so.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.mesh import presets

EXPERTS = presets.ep("expert") | xpp.AxisRules(
    parameters={
        "*.into": ("expert", "embed", "mlp"),
        "*.beside": ("expert", "embed", "mlp"),
        "*.out_of": ("expert", "mlp", "embed"),
    }
)


class RoutedExperts(nn.Module):
    """Experts, to each of which go the tokens that its gate likes best.

    Takes the place of the block of Mixtral, Qwen2-MoE, Qwen3-MoE or OLMoE, with the
    weights of its experts as three tensors with a dimension of experts.

    Args:
        block: The block; its parameters are copied, those of the gate are kept.
        capacity: An expert has room for so many times its fair share of tokens; what
            comes late passes by and counts in `dropped`. None: for all tokens.
    """

    def __init__(self, block: nn.Module, capacity: float | None = None) -> None:
        super().__init__()
        self.gate, self.top_k, self.capacity = block.gate, block.top_k, capacity
        self.is_normed = getattr(block, "norm_topk_prob", True)
        self.shared = getattr(block, "shared_expert", None)
        self.shared_gate = getattr(block, "shared_expert_gate", None)
        self.activation = block.experts[0].act_fn
        is_mixtral = hasattr(block.experts[0], "w1")
        names = (
            ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
        )
        self.into, self.beside, self.out_of = (
            nn.Parameter(
                torch.stack(
                    [getattr(e, name).weight.detach().t() for e in block.experts]
                )
            )
            for name in names
        )
        self.register_buffer("dropped", torch.zeros((), dtype=torch.long))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' values and the gate's, as the block does."""
        tokens = hidden.flatten(0, 1)
        logits = self.gate(tokens)
        weights, chosen = logits.float().softmax(-1).topk(self.top_k, -1)
        if self.is_normed:
            weights = weights / weights.sum(-1, keepdim=True)
        mixed = self.mixed(tokens, weights.to(hidden.dtype), chosen)
        if self.shared is not None:
            mixed = mixed + self.shared_gate(tokens).sigmoid() * self.shared(tokens)
        return mixed.view_as(hidden), logits

    def mixed(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sum of what each token's experts make of it.

        Args:
            tokens: (tokens, width).
            weights: (tokens, experts of a token).
            chosen: Indices of these experts.
        """
        count, experts = len(tokens), len(self.into)
        share = count * self.top_k / experts
        room = count
        if self.capacity is not None:
            room = min(count, math.ceil(self.capacity * share))
        wanted = F.one_hot(chosen.flatten(), experts)
        # The place of each token in the queue of its expert.
        place = (wanted.cumsum(0) * wanted).sum(-1) - 1
        slot = chosen.flatten() * room + place
        # Who finds no room goes to a slot behind the last, which nobody computes.
        slot = slot.where(place < room, experts * room)
        self.dropped.add_((place >= room).sum())
        # Whose token is in which slot; one behind the last token stands for nobody.
        nobody = torch.full((experts * room + 1,), count, device=slot.device)
        owner = torch.arange(count, device=slot.device).repeat_interleave(self.top_k)
        owners = nobody.scatter(0, slot, owner)[:-1].view(experts, room)
        zero = tokens.new_zeros(1, tokens.shape[-1])
        # Here tokens leave for the devices of their experts, and there they return.
        inside = xpp.shard(torch.cat([tokens, zero])[owners], "expert", None, "embed")
        hidden = self.activation(inside @ self.into) * (inside @ self.beside)
        hidden = xpp.shard(hidden, "expert", None, "mlp")
        outside = xpp.shard(hidden @ self.out_of, "expert", None, "embed")
        values = torch.cat([outside.flatten(0, 1), zero])[slot].view(
            count, -1, len(zero[0])
        )
        return xpp.shard((values * weights.unsqueeze(-1)).sum(1), "batch", "embed")


def with_routed_experts(model: nn.Module, capacity: float | None = None) -> nn.Module:
    """Replace all blocks of experts of a model, in place."""
    for parent in list(model.modules()):
        for name, block in list(parent.named_children()):
            if isinstance(getattr(block, "experts", None), nn.ModuleList):
                setattr(parent, name, RoutedExperts(block, capacity))
    return model
