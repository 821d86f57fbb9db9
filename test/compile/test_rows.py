"""Sums, means and softmax by calls of ours are those of eager PyTorch."""

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from compile.own_calls import check
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from torch_xla_pp import cpu, xla_compat
from torch_xla_pp.compile import library_rules
from torch_xla_pp.compile.lowering import Lowering
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

INF, NAN = math.inf, math.nan
SHAPES = ((40,), (1, 33), (300, 7), (7, 300), (2, 5, 70), (70, 3, 5), (3, 40, 1, 50))
# The widest has several blocks of columns and of rows, and the last rows do not fill a
# vector.
LENGTHS = (1, 3, 16, 33, 100, 2051)
_safe_softmax = torch.ops.aten._safe_softmax.default


def is_of_rows_or_columns(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    """Return whether dimensions are the first or the last ones that are no ones."""
    marks = [i in dims for i, size in enumerate(shape) if size > 1]
    return sorted(marks) in (marks, marks[::-1])


def sums_and_means(
    calls: list[tuple[tuple[int, ...], bool]], x: Tensor
) -> tuple[Tensor, ...]:
    sums = [x.sum(dims, keepdim=keep) for dims, keep in calls]
    return *sums, *(x.mean(dims, keepdim=keep) for dims, keep in calls)


def sums() -> None:
    xla_compat.enable_spmd()
    torch.manual_seed(0)
    for shape in SHAPES:
        x = torch.randn(shape)
        places = range(len(shape))
        choices = [
            dims for n in places for dims in itertools.combinations(places, n + 1)
        ]
        calls = []
        expected = 0
        for number, dims in enumerate(choices):
            is_long = max(shape[dim] for dim in dims) > 32
            expected += is_long and is_of_rows_or_columns(shape, dims)
            given = tuple(dim - len(shape) if number % 2 else dim for dim in dims)
            calls.append((given, bool(number % 3)))

        check(functools.partial(sums_and_means, calls), x, num_calls=2 * expected)


def test_sums_and_means_over_any_dimensions_are_those_of_eager(worlds: Worlds) -> None:
    worlds.run(sums, ranks=1, devices=1)


def other_sums() -> None:
    xla_compat.enable_spmd()
    x = torch.randn(64, 48)
    check(lambda x: (x.double().sum(0),), x, num_calls=0)
    check(lambda x: (x.sign().bfloat16().sum(0),), x, num_calls=0)
    check(lambda x: (x.long().sum(1),), x, num_calls=0)
    check(lambda x: (x.sum(0, dtype=torch.float64),), x, num_calls=0)
    check(lambda x: (x[:0].sum(0), x[:, :0].sum(1)), x, num_calls=0)
    # XLA joins a short sum with what is around.
    check(lambda x: (x[:32].sum(0),), x, num_calls=0)


def test_sums_of_other_kinds_are_left_to_xla(worlds: Worlds) -> None:
    worlds.run(other_sums, ranks=1, devices=1)


def sums_of_no_numbers() -> None:
    xla_compat.enable_spmd()
    x = torch.randint(-9, 10, (300, 2100)).float()
    x[3, 4], x[5, 6], x[7, 8] = INF, -INF, NAN
    for value in (x, x.t().contiguous()):
        check(lambda x: (x.sum(0), x.sum(1)), value, num_calls=2)
    x[200, 4] = x[3, 1500] = -INF
    check(lambda x: (x.sum(0), x.sum(1)), x, num_calls=2)


def test_what_is_infinite_or_no_number_counts_in_its_own_sums(worlds: Worlds) -> None:
    worlds.run(sums_of_no_numbers, ranks=1, devices=1)


def long_sums() -> list[float]:
    """Return the relative errors of sums of many numbers of one sign."""
    xla_compat.enable_spmd()
    torch.manual_seed(0)
    x = torch.rand(200_000, 8) + 1
    errors = []
    for dim, value in ((0, x), (1, x.t().contiguous())):
        module = make_fx(functools.partial(torch.sum, dim=dim))(value)
        device = value.to(xla_compat.device())
        got = Lowering(module, "test", library_rules()).run(device)
        want = value.double().sum(dim)
        errors.append(float((got.cpu().double() / want - 1).abs().max()))
    return errors


def test_long_sums_are_exact_to_a_few_units(worlds: Worlds) -> None:
    """Numbers added up one after another would be off by some 1e-5."""
    (errors,) = worlds.run(long_sums, ranks=1, devices=1)
    assert all(error < 1e-6 for error in errors), errors


def rows_of(length: int) -> Tensor:
    """Return rows of usual and of extreme numbers."""
    x = torch.randn(12, length) * 4
    x[1] *= 30
    x[2, :] = 3e38
    x[3, ::2] = -INF
    x[4] = -INF
    x[5, 0] = INF
    x[6, -1] = NAN
    x[7], x[7, 0] = -INF, NAN
    x[8] = -104.0
    x[8, 0] = 0.0
    return x.reshape(3, 4, length)


Softmax = Callable[[Tensor, int], Tensor]


def along(function: Softmax, dim: int) -> Callable[[Tensor], tuple[Tensor]]:
    return lambda x: (function(x, dim),)


def with_grad(
    function: Softmax,
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    def backward(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        output = function(leaf, -1)
        # It is the program's own, and read once more.
        scaled = 3 * grad
        (found,) = torch.autograd.grad(output, [leaf], [scaled])
        return output.detach(), found, scaled

    return backward


def softmaxes() -> None:
    xla_compat.enable_spmd()
    torch.manual_seed(0)
    for length in LENGTHS:
        x, grad = rows_of(length), torch.randn(3, 4, length)

        for function in (functional.softmax, functional.log_softmax):
            check(along(function, 2), x, num_calls=1)
        check(with_grad(functional.softmax), x, grad, num_calls=2)
        # The sum of a row's gradients, some 100, is multiplied with e^x.
        check(with_grad(functional.log_softmax), x, grad, num_calls=2, atol=3e-5)
        check(along(_safe_softmax, -1), x, num_calls=1)
    # Of other dimensions and types, XLA makes it.
    for function in (functional.softmax, functional.log_softmax):
        check(along(function, 0), x, num_calls=0)
        check(along(function, -1), x.double(), num_calls=0)
        check(along(function, -1), x[:0], num_calls=0)


def test_softmax_and_its_gradient_are_those_of_eager(worlds: Worlds) -> None:
    worlds.run(softmaxes, ranks=1, devices=1)


def large_values() -> None:
    """Several threads share the work, should the machine have as many cores."""
    xla_compat.enable_spmd()
    torch.manual_seed(0)
    # Whole numbers have exact sums.
    x = torch.randint(-9, 10, (1100, 2100)).float()
    check(lambda x: (x.sum(0), x.sum(1), functional.softmax(x, -1)), x, num_calls=3)


def test_large_values_are_shared_by_threads(worlds: Worlds) -> None:
    worlds.run(large_values, ranks=1, devices=1)


def are_used() -> bool:
    xla_compat.enable_spmd()
    return cpu.has_own_ops() and bool(library_rules())


def test_ranks_of_several_devices_leave_them_to_xla(worlds: Worlds) -> None:
    """XLA cannot split a call over devices."""
    assert worlds.run(are_used, ranks=1, devices=1) == [True]
    assert worlds.run(are_used, ranks=1, devices=2) == [False]
