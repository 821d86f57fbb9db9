"""Products by PyTorch's library are those of XLA, and are called where they should."""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import Function, Program, ProgramSpec
from torch_xla_pp.compile.products import OwnProducts, has_own_products
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

# The last one is cut into parts for several threads.
SIDES = ((1, 1, 1), (3, 5, 7), (33, 64, 17), (1, 128, 300), (500, 128, 260))
TURNS = ("", "t", "transpose", "permute", "twice")


def turned(value: Tensor, turn: str) -> Tensor:
    """Return a matrix of other strides that is equal to `value`."""
    match turn:
        case "t":
            return value.t().contiguous().t()
        case "transpose":
            return value.t().contiguous().transpose(-1, 0)
        case "permute":
            return value.t().contiguous().permute(-1, 0)
        case "twice":
            return value.t().t()
    return value


def own_calls(module: fx.GraphModule, args: list[Tensor]) -> int:
    """Count the calls of the library in a graph."""
    device = [value.to(xla_compat.device()) for value in args]
    outputs = OwnProducts(module, "test").run(*device)
    return xla_compat.hlo_text(list(outputs)).count('"torch_xla_pp.product.')


def check(call: Any, *args: Tensor, num_calls: int) -> None:
    """Run a function of host tensors as a program, and compare."""
    module = make_fx(call)(*args)
    names = tuple(f"x{i}" for i in range(len(args)))
    function = Function(name="test", module=module, inputs=names, outputs=("out",))
    values = [value.to(xla_compat.device()) for value in args]
    program = Program(ProgramSpec(function=function))
    (want,) = call(*args)
    for _ in range(2):
        got = program(dict(zip(names, values, strict=True)))["out"]
        torch.testing.assert_close(got.cpu(), want)
    assert own_calls(module, list(args)) == num_calls


def product_of_turned(turns: tuple[str, str], *factors: Tensor) -> tuple[Tensor]:
    left, right = map(turned, factors, turns)
    return (left @ right,)


def all_sides_and_turns() -> None:
    xla_compat.enable_spmd()
    assert has_own_products()
    torch.manual_seed(0)
    for rows, depth, columns in SIDES:
        left, right = torch.randn(rows, depth), torch.randn(depth, columns)
        for turns in itertools.product(TURNS, TURNS):
            call = functools.partial(product_of_turned, turns)
            check(call, left, right, num_calls=1)


def test_products_are_right_for_all_sides_and_turns(worlds: Worlds) -> None:
    worlds.run(all_sides_and_turns, ranks=1, devices=1, keep_workers=True)


def others() -> None:
    xla_compat.enable_spmd()
    torch.manual_seed(0)
    x, y, bias = torch.randn(4, 6), torch.randn(6, 5), torch.randn(5)

    check(lambda x, y, bias: (torch.addmm(bias, x, y),), x, y, bias, num_calls=1)
    # The library has no products of other types here, nor of nothing.
    check(lambda x, y: (x @ y,), x.double(), y.double(), num_calls=0)
    check(lambda x, y: (x @ y,), x.bfloat16(), y.bfloat16(), num_calls=0)
    check(lambda x, y: (x @ y,), x[:, :0], y[:0], num_calls=0)
    check(lambda x, y: (x @ y,), x[:0], y, num_calls=0)
    # Each at its own place, also where XLA may compute both at once.
    check(lambda x, y: ((x @ y) * (x.sin() @ y),), x, y, num_calls=2)


def test_what_the_library_does_not_do_is_left_to_xla(worlds: Worlds) -> None:
    worlds.run(others, ranks=1, devices=1, keep_workers=True)


def test_ranks_of_several_devices_leave_products_to_xla() -> None:
    xla_compat.enable_spmd()
    assert xla_compat.num_local_devices() == 2
    assert not has_own_products()


def switched_off(text: str) -> bool:
    xla_compat.enable_spmd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_XLA_PP_PRODUCTS", text)
        return has_own_products()


def test_the_user_has_the_choice(worlds: Worlds) -> None:
    def chosen(text: str) -> list[bool]:
        return worlds.run(
            switched_off, ranks=1, devices=1, args=(text,), keep_workers=True
        )

    assert chosen("xla") == [False]
    assert chosen("torch") == [True]
