"""Estimates of a stage's work."""

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from torch_xla_pp.graph.flops import forward_flops

pytestmark = pytest.mark.pure


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        head = self.project(x).unsqueeze(1)
        return F.scaled_dot_product_attention(head, head, head) * self.scale


def traced(device: str) -> fx.GraphModule:
    module = Attention().to(device)
    x = torch.zeros(2, 16, 8, device=device)
    return torch.export.export(module, (x,)).module()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_products_and_attention_count(device: str) -> None:
    project, attend = 2 * (2 * 16) * 8 * 8, 2 * 2 * (2 * 16 * 16 * 8)
    assert forward_flops(traced(device)) == project + attend


def test_a_module_that_cannot_run_has_no_estimate() -> None:
    module = traced("cpu")
    node = next(n for n in module.graph.nodes if n.op == "placeholder")
    node.meta["val"] = torch.zeros(2, 16, 7)
    assert forward_flops(module) is None
