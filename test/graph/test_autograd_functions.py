"""Functions with a backward of their own keep it in models that are split."""

from typing import Any

import pytest
import torch
from graph.splitting import Net, split
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.nn import functional as F

import torch_xla_pp as xpp

pytestmark = pytest.mark.pure


class Thousandfold(torch.autograd.Function):
    """A backward that no derivative of the forward is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, power: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.power = power
        return x.sign() * weight + torch.arange(4.0, device=x.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * x**ctx.power * 1000, grad.sum(0), None


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        index = x.argmax(-1)
        ctx.mark_non_differentiable(index)
        return x.exp(), index

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        return 7 * grad


def forward(net: Net, x: Tensor) -> Tensor:
    x = Thousandfold.apply(net.layers[0](x), net.layers[1].bias, 2)
    x, index = Two.apply(net.layers[2](x))
    return net.layers[3](x) + index[:, None]


def test_gradients_are_those_of_its_backward() -> None:
    """`split` compares gradients; both sides of the cut have a function."""
    pipe = split(forward, split_spec={"layers.2": SplitPoint.BEGINNING})
    assert pipe.num_stages == 2


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Thousandfold.apply(self.first(x), self.first.bias, 3))


def test_two_models_keep_their_own_functions() -> None:
    """Functions of all models have one name."""

    def pipe_of(model: nn.Module) -> xpp.Pipe:
        spec = {"second": SplitPoint.BEGINNING}
        return xpp.pipeline(model, mb_args=(torch.ones(2, 4),), split_spec=spec)

    torch.manual_seed(0)
    model, x = Cut(), torch.randn(2, 4)
    first = pipe_of(model)
    split(forward, split_spec={"layers.2": SplitPoint.BEGINNING})
    torch.testing.assert_close(first(x)[0], model(x))
    F.mse_loss(first(x)[0], x).backward()
    got = model.first.weight.grad
    assert got is not None
    model.first.weight.grad = None
    F.mse_loss(model(x), x).backward()
    torch.testing.assert_close(got, model.first.weight.grad)
