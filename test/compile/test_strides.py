"""Strides of a trace make no difference, although XLA's values have none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile.stages import Compiled, close
from ops.checking import Case, judge
from torch import Tensor, nn

from torch_xla_pp import xla_compat

pytestmark = pytest.mark.xla


class Block(nn.Module):
    """A norm over channels as in ConvNeXt, which leaves them last in memory."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.pool = nn.AdaptiveAvgPool2d(size)
        self.head = nn.Linear(8 * size * size, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(self.pool(x).flatten(1))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_channels_last_in_memory_can_be_pooled(mesh: Any, size: int) -> None:
    torch.manual_seed(0)
    eager, x = Block(size), torch.randn(2, 3, 8, 8, requires_grad=True)
    tangent = torch.randn(2, 4)
    compiled = Compiled(eager, [x], mesh)
    expected = eager(x)
    expected.backward(tangent)
    result = compiled.forward([compiled.upload(x)])
    assert close(result.outputs[0], expected)
    result.live["tangent:0"] = compiled.upload(tangent)
    fixed = {**compiled.fixed, **compiled.zero_sums()}
    grads, sums = compiled.programs.backward(fixed, result.live)
    assert close(grads[0], x.grad)
    for name, parameter in eager.named_parameters():
        assert close(sums[f"sum:param:{name}"], parameter.grad), name


class Calling(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.function(x),)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2).unsqueeze_(0).squeeze_(0).t_(),
        lambda x: (x * 2).t().as_strided((3, 2), (2, 1)),
        lambda x: (x * 2).t().as_strided((2, 2), (1, 3), 1),
        lambda x: (x * 2).t().contiguous().as_strided((3, 2), (2, 1)),
        lambda x: x.quantile(0.3, dim=0),
        lambda x: x.t().reshape(2, -1),
    ],
)
def test_views_are_those_of_eager(function: Callable[[Tensor], Tensor]) -> None:
    xla_compat.enable_spmd()
    torch.manual_seed(0)
    inputs = (torch.randn(4, 6, requires_grad=True),)
    verdict = judge(Case(module=Calling(function), inputs=inputs, text=""))
    assert verdict.kind == "right", verdict.text
