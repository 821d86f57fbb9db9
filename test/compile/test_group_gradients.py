"""Sums per group of rows add up to the gradients of eager."""

from typing import Any

import pytest
import torch
from compile.stages import Compiled, close
from torch import Tensor, nn
from torch.nn import functional as F

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.group_sums.group_gradients import Grouping
from torch_xla_pp.compile.group_sums.row_groups import RowGroups

pytestmark = pytest.mark.xla

REFUSED = {
    "param:falling": "aten.flip.default is not cut into groups of rows",
    "param:scale": "the parameter is split over the batch axis",
}


class Varied(nn.Module):
    """Parameters whose gradients are summed in every known way, and in another."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(12, 8, padding_idx=3)
        self.position = nn.Embedding(5, 8)
        self.table = nn.Parameter(torch.randn(12, 8))
        self.scale = nn.Parameter(torch.randn(()))
        self.heads = nn.Parameter(torch.randn(8, 2, 4))
        self.convolution = nn.Conv1d(3, 6, 3, padding=1, groups=3)
        self.experts = nn.Parameter(torch.randn(2, 8, 8))
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.upper = nn.Parameter(torch.randn(5, 8))
        self.lower = nn.Parameter(torch.randn(3, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.wide = nn.Parameter(torch.randn(16, 8))
        self.falling = nn.Parameter(torch.randn(8))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        places = torch.arange(3, device=x.device)
        h = x + self.token(tokens) + self.position(places)
        h = h + self.table[tokens] * self.scale
        h = torch.einsum("bsd,dhk->bshk", h, self.heads).flatten(2)
        h = self.convolution(h).unflatten(1, (2, 3))
        h = torch.einsum("becd,edf->becf", h, self.experts).flatten(1, 2).tanh()
        h = torch.cat([self.first.expand(4, 1, 8), h], 1)
        h = h @ torch.cat([self.upper, self.lower]).t() / 3
        h = h - self.attention(h, h, h)[0]
        h = F.linear(h.double(), self.wide[:8].double()).float()
        return h * self.falling.cumsum(0)


def grouping_over(mesh: Any, module: nn.Module) -> Grouping:
    def layout(num_dims: int, dim: int | None) -> Any:
        return mesh.get_op_sharding(
            tuple("data" if i == dim else None for i in range(num_dims))
        )

    sums = {
        f"param:{name}": layout(value.dim() + 1, 0)
        for name, value in module.named_parameters()
        if name != "scale"
    }
    dims = {"input:0": 0, "input:1": 0, "tangent:0": 0}
    return Grouping(RowGroups(2, layout), dims, sums)


def test_sums_per_group_add_up_to_the_gradient(mesh: Any) -> None:
    torch.manual_seed(0)
    eager = Varied()
    examples = [
        torch.zeros(4, 3, 8, requires_grad=True),
        torch.zeros(4, 3, dtype=torch.int64),
    ]
    grouping = grouping_over(mesh, eager)
    compiled = Compiled(eager, examples, mesh, grouping=grouping)
    programs, sums = compiled.programs, compiled.zero_sums()
    assert programs.reduced_per_microbatch == REFUSED
    for _ in range(2):
        x, tokens = torch.randn(4, 3, 8), torch.randint(0, 12, (4, 3))
        expected, weight = eager(x, tokens), torch.randn(4, 7, 8)
        (expected * weight).sum().backward()
        result = compiled.forward([compiled.upload(x), compiled.upload(tokens)])
        assert close(result.outputs[0], expected)
        result.live["tangent:0"] = compiled.upload(weight)
        _, sums = programs.backward({**compiled.fixed, **sums}, result.live)
    texts = dict(zip(sums, xla_compat.sharding_texts([*sums.values()]), strict=True))
    assert texts["sum:param:table"] == "{devices=[2,1,1]0,1}"
    assert texts["sum:param:scale"] == "{replicated}"
    before = compiled.upload(torch.full((12, 8), 2.0), compiled.whole)
    reduced = compiled.sum_programs.reduce(sums, {"param:table": before})
    assert set(xla_compat.sharding_texts([*reduced.values()])) == {"{replicated}"}
    assert len(reduced) == len(sums) - len(REFUSED)
    assert close(reduced.pop("sum:param:table"), eager.table.grad + 2)
    found = {**{n: v for n, v in sums.items() if n[4:] in REFUSED}, **reduced}
    for name, parameter in eager.named_parameters():
        if name not in ("table", "unused.weight", "unused.bias"):
            assert close(found[f"sum:param:{name}"], parameter.grad), name
