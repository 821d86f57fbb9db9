"""What upstream's test_unflatten asserts: a split inside a block keeps names."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import pipe_split
from torch.nn import functional as F

import torch_xla_pp as xpp

pytestmark = pytest.mark.pure

CHANNELS, SIZE = 2, 8


class Block(nn.Module):
    """A block that is split within, where it changes a value in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, kernel_size=3, padding=1)
        self.linears = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))

    def forward(self, x: Tensor, constant: Tensor) -> Tensor:
        x = self.linears[0](self.conv(x))
        pipe_split()
        x.add_(constant)
        return F.relu(self.linears[1](x))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, constant: Tensor) -> Tensor:
        x = self.blocks[0](x, constant)
        pipe_split()
        return self.blocks[1](x, constant)


def test_a_split_inside_of_blocks_keeps_output_and_names() -> None:
    model = Blocks()
    x = torch.randn(1, CHANNELS, SIZE, SIZE)
    constant = torch.ones(1, CHANNELS, SIZE, SIZE)
    pipe = xpp.pipeline(model, (x,), {"constant": constant})
    assert pipe.num_stages == 4
    known = set(model.state_dict())
    for index in range(pipe.num_stages):
        stage = pipe.get_stage_module(index)
        assert {name for name, _ in stage.named_parameters()} <= known
    torch.testing.assert_close(pipe(x, constant)[0], model(x, constant))
