"""What upstream's test_pipe asserts: a split model computes what it did."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import pipe_split
from torch.nn import functional as F

import torch_xla_pp as xpp
from upstream.jobs import ROWS, WIDTH, Mlp

pytestmark = pytest.mark.pure


class Skipping(nn.Module):
    """A value skips a stage, and two stages use one weight (upstream: ExampleCode)."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(2, WIDTH, WIDTH).unbind())
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = torch.mm(x, self.weights[0])
        x = F.relu(kept + y)
        pipe_split()
        x = self.linears[0](torch.mm(x, self.weights[0]))
        pipe_split()
        x = torch.mm(F.relu(x) + kept, self.weights[1])
        pipe_split()
        return F.relu(self.linears[1](x))


class LateInput(nn.Module):
    """The last stage takes an input of the model (upstream: MultiMLP there)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index:
                pipe_split()
            x = layer(x)
        return x - y


class Aliased(nn.Module):
    """Two stages that use all parameters, under two names (ModelWithParamAlias)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight0 = self.weight1 = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.linear0 = self.linear1 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(self.linear0(torch.mm(x, self.weight0) + y))
        pipe_split()
        return F.relu(self.linear1(torch.mm(x, self.weight1)))


@pytest.mark.parametrize(
    ("make", "num_stages"), [(Skipping, 4), (LateInput, 4), (Aliased, 2)]
)
def test_a_split_keeps_output_and_names(
    make: Callable[[], nn.Module], num_stages: int
) -> None:
    model = make()
    x, y = torch.randn(2, ROWS, WIDTH)
    pipe = xpp.pipeline(model, mb_args=(x, y))
    assert pipe.num_stages == num_stages
    torch.testing.assert_close(pipe(x, y)[0], model(x, y))
    known = set(model.state_dict())
    for index in range(num_stages):
        assert set(pipe.get_stage_module(index).state_dict()) <= known
