"""GELU and its gradient by calls of ours are those of eager PyTorch."""

import math

import pytest
import torch
from compile.own_calls import check
from torch import Tensor
from torch.nn.functional import gelu

from torch_xla_pp import cpu, xla_compat
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

# The last one is cut into parts for several threads.
SHAPES = ((), (1,), (3, 5, 7), (2, 1 << 18))
_gelu_grad = torch.ops.aten.gelu_backward.default


def shapes() -> None:
    xla_compat.enable_spmd()
    torch.manual_seed(0)
    for shape in SHAPES:
        x, grad = 3 * torch.randn(shape), torch.randn(shape)
        # Eager's error is 1.2e-6 where x is 3.5.
        check(lambda x: (gelu(x),), x, num_calls=1, atol=2e-6)
        check(lambda grad, x: (_gelu_grad(grad, x),), grad, x, num_calls=1)


def test_gelu_and_its_gradient_are_those_of_eager(worlds: Worlds) -> None:
    worlds.run(shapes, ranks=1, devices=1)


def others() -> None:
    xla_compat.enable_spmd()
    x = torch.randn(4, 6)
    check(lambda x: (gelu(x, approximate="tanh"),), x, num_calls=0)
    check(lambda x: (_gelu_grad(x, x, approximate="tanh"),), x, num_calls=0)
    check(lambda x: (gelu(x),), x.double(), num_calls=0)
    check(lambda x: (gelu(x),), x[:0], num_calls=0)


def test_other_kinds_of_gelu_are_left_to_xla(worlds: Worlds) -> None:
    worlds.run(others, ranks=1, devices=1)


def errors() -> tuple[float, float, list[float], list[float]]:
    """Return largest errors of P(x) = GELU(x) / x and of the gradient; special ones."""
    xla_compat.enable_spmd()
    x = torch.linspace(-12, 12, 1 << 18)
    device = xla_compat.device()
    ones = torch.ones_like(x).to(device)
    wide = x.double().requires_grad_()
    gelu(wide).sum().backward()
    assert wide.grad is not None
    value = cpu.gelu(x.to(device)).cpu()
    slope = cpu.gelu_grad(ones, x.to(device)).cpu()
    part = ((value - gelu(wide.detach())) / x).abs().max().item()
    special = torch.tensor([0.0, -0.0, math.inf, math.nan, 1e-40, -1e30, 1e30])
    got = cpu.gelu(special.to(device)).cpu().tolist()
    slopes = cpu.gelu_grad(torch.ones(7).to(device), special.to(device)).cpu()
    return part, (slope - wide.grad).abs().max().item(), got, slopes.tolist()


def test_errors_are_some_units_in_the_last_place(worlds: Worlds) -> None:
    ((part, slope, special, slopes),) = worlds.run(errors, ranks=1, devices=1)
    assert part < 2e-7
    assert slope < 4e-7
    assert special[:3] == [0.0, 0.0, math.inf]
    assert math.isnan(special[3])
    assert special[5:] == [0.0, pytest.approx(1e30)]
    assert slopes[:2] == [0.5, 0.5]
    assert slopes[5:] == [0.0, pytest.approx(1.0)]
    assert math.isnan(slopes[3])


def reads_of(x: Tensor) -> tuple[Tensor, ...]:
    return gelu(x), gelu(x.t()), gelu(x[:, :3] * 2)


def views() -> None:
    xla_compat.enable_spmd()
    check(reads_of, torch.randn(4, 6), num_calls=3, atol=2e-6)


def test_views_have_their_own(worlds: Worlds) -> None:
    worlds.run(views, ranks=1, devices=1)
