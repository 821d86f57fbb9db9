"""Blocks of experts with fixed shapes compute what the loop over experts does.

Tolerance 1e-5, float32: the same products, summed in another order.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds

transformers = pytest.importorskip("transformers")

COUNT, WIDTH, EXPERTS = 24, 16, 4
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "use_cache": False,
}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def block_of(kind: str) -> nn.Module:
    """Return a block of experts whose first two get most of the tokens."""
    layer = model_of(kind).model.layers[0]
    block: nn.Module = layer.block_sparse_moe if kind == "mixtral" else layer.mlp
    nn.init.normal_(block.gate.weight)
    block.gate.weight.data[2:] *= 0.3
    return block


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, COUNT // 2, WIDTH, generator=generator)


@pytest.mark.pure
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_no_token_is_dropped_if_there_is_room_for_all(kind: str) -> None:
    from routed_experts import RoutedExperts

    block = block_of(kind)
    routed = RoutedExperts(copy.deepcopy(block))
    (expected, wanted), (mixed, logits) = block(tokens()), routed(tokens())
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits, wanted)
    for result in (mixed, expected):
        result.square().sum().backward()
    others = ("gate_proj", "up_proj", "down_proj")
    names = ("w1", "w3", "w2") if kind == "mixtral" else others
    stacks = (routed.into, routed.beside, routed.out_of)
    for name, stack in zip(names, stacks, strict=True):
        own = [getattr(expert, name).weight.grad.t() for expert in block.experts]
        torch.testing.assert_close(stack.grad, torch.stack(own), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(routed.gate.weight.grad, block.gate.weight.grad)
    assert routed.dropped == 0


@pytest.mark.pure
def test_tokens_without_room_pass_by_and_are_counted() -> None:
    from routed_experts import RoutedExperts

    block = block_of("mixtral")
    routed = RoutedExperts(block, capacity=1.0)
    x = tokens().flatten(0, 1)
    room = COUNT * 2 // EXPERTS
    weights, chosen = block.gate(x).softmax(-1).topk(2, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    expected, used, dropped = torch.zeros_like(x), [0] * EXPERTS, 0
    for row in range(COUNT):
        for weight, expert in zip(weights[row], chosen[row].tolist(), strict=True):
            used[expert] += 1
            if used[expert] <= room:
                expected[row] += weight * block.experts[expert](x[row])
            else:
                dropped += 1
    mixed, _ = routed(x[None])
    torch.testing.assert_close(mixed[0], expected, rtol=1e-5, atol=1e-6)
    assert routed.dropped == dropped > 0


class Layers(nn.Module):
    """Two blocks of experts, one of each stage."""

    def __init__(self) -> None:
        super().__init__()
        from routed_experts import with_routed_experts

        self.layers = nn.ModuleList(block_of("mixtral") for _ in range(2))
        with_routed_experts(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def verify() -> tuple[str, bool, float]:
    """Return the report, whether all is equal, and the share that a device lacks."""
    from routed_experts import EXPERTS as RULES

    torch.distributed.init_process_group("xla_pp")
    mesh = xpp.init_device_mesh("xla", (2, 2), mesh_dim_names=("pp", "expert"))
    model, x = Layers(), torch.randn(8, 6, WIDTH)
    spec = {"layers.1": SplitPoint.BEGINNING}
    pipe = xpp.pipeline(model, (x[:2].clone(),), split_spec=spec)
    rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    stage = pipe.build_stage(
        rank, xpp.device(), group, mesh=mesh["expert"], sharding=RULES
    )
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    found = xpp.verify(model, schedule, x, x.flip(0))
    into = model.layers[rank].into
    lacks = 4 * stage.explain().num_parameters - stage.explain().parameter_bytes
    return str(found), found.is_equal, lacks / (3 * into.numel() * into.element_size())


@pytest.mark.worlds
def test_experts_are_split_over_devices_and_nothing_changes(worlds: Worlds) -> None:
    for report, is_equal, lacks in worlds.run(verify, ranks=2, devices=2):
        assert is_equal, report
        assert lacks == pytest.approx(0.5, abs=0.01)
