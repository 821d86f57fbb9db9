"""Products by a library are those of XLA, and are called where they should be."""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from joining import join
from torch import Tensor, fx, nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.fx.experimental.proxy_tensor import make_fx

import torch_xla_pp as xpp
from torch_xla_pp import cpu, native, xla_compat
from torch_xla_pp.compile import Function, LibraryProducts, Program, ProgramSpec
from torch_xla_pp.compile.lowering import Lowering
from torch_xla_pp.cpu.products import (
    add_product,
    multiply,
    multiply_biased,
    multiply_parts,
)
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

RULES = (
    LibraryProducts(
        multiply=multiply, multiply_biased=multiply_biased, add_product=add_product
    ),
)
# The last one is cut into parts for several threads.
SIDES = ((1, 1, 1), (3, 5, 7), (33, 64, 17), (1, 128, 300), (500, 128, 260))
BATCHES = ((1, 3, 5, 7), (3, 4, 1, 2), (12, 33, 64, 17))
LIBRARIES = ("openblas", "torch")
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
    """Count the calls of the library in a graph, but for those with a bias."""
    return hlo_text(module, args).count('"torch_xla_pp.product.')


def hlo_text(module: fx.GraphModule, args: Sequence[Tensor]) -> str:
    device = [value.to(xla_compat.device()) for value in args]
    outputs = Lowering(module, "test", RULES).run(*device)
    return xla_compat.hlo_text(list(outputs))


def check(call: Any, *args: Tensor, num_calls: int) -> None:
    """Run a function of host tensors as a program, and compare."""
    module = make_fx(call)(*args)
    names = tuple(f"x{i}" for i in range(len(args)))
    function = Function(name="test", module=module, inputs=names, outputs=("out",))
    values = [value.to(xla_compat.device()) for value in args]
    program = Program(ProgramSpec(function=function, rules=RULES))
    (want,) = call(*args)
    for _ in range(2):
        got = program(dict(zip(names, values, strict=True)))["out"]
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-4)
    assert own_calls(module, list(args)) == num_calls


def products_of_turned(turns: tuple[str, str], *factors: Tensor) -> tuple[Tensor]:
    left, right = (
        value.transpose(1, 2).contiguous().transpose(-1, -2) if turn else value
        for value, turn in zip(factors, turns, strict=True)
    )
    return (torch.bmm(left, right),)


def product_of_turned(turns: tuple[str, str], *factors: Tensor) -> tuple[Tensor]:
    left, right = map(turned, factors, turns)
    return (left @ right,)


@contextlib.contextmanager
def products_of(name: str) -> Iterator[None]:
    """Let a library multiply, as in a process that has just begun."""
    xla_compat.enable_spmd()
    cpu.library_product.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_XLA_PP_PRODUCTS", name)
        assert cpu.library_product() is multiply
        yield
    cpu.library_product.cache_clear()
    cpu.library_product()


def all_sides_and_turns(name: str) -> None:
    with products_of(name):
        check_all_sides_and_turns()


def check_all_sides_and_turns() -> None:
    torch.manual_seed(0)
    for rows, depth, columns in SIDES:
        left, right = torch.randn(rows, depth), torch.randn(depth, columns)
        for turns in itertools.product(TURNS, TURNS):
            call = functools.partial(product_of_turned, turns)
            check(call, left, right, num_calls=1)
    for batch, rows, depth, columns in BATCHES:
        left = torch.randn(batch, rows, depth)
        right = torch.randn(batch, depth, columns)
        for turns in itertools.product(("", "transpose"), repeat=2):
            call = functools.partial(products_of_turned, turns)
            check(call, left, right, num_calls=1)


@pytest.mark.parametrize("name", LIBRARIES)
def test_products_are_right_for_all_sides_and_turns(worlds: Worlds, name: str) -> None:
    worlds.run(all_sides_and_turns, ranks=1, devices=1, args=(name,), keep_workers=True)


def others(name: str) -> None:
    with products_of(name):
        check_others()


def check_others() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 6), torch.randn(6, 5)
    # The library has no products of other types here, nor of nothing.
    check(lambda x, y: (x @ y,), x.double(), y.double(), num_calls=0)
    check(lambda x, y: (x @ y,), x.bfloat16(), y.bfloat16(), num_calls=0)
    check(lambda x, y: (x @ y,), x[:, :0], y[:0], num_calls=0)
    check(lambda x, y: (x @ y,), x[:0], y, num_calls=0)
    check(lambda x, y: (torch.bmm(x[None, :][:0], y[None, :][:0]),), x, y, num_calls=0)
    # Each at its own place, also where XLA may compute both at once.
    check(lambda x, y: ((x @ y) * (x.sin() @ y),), x, y, num_calls=2)


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_the_library_does_not_do_is_left_to_xla(worlds: Worlds, name: str) -> None:
    worlds.run(others, ranks=1, devices=1, args=(name,), keep_workers=True)


def test_ranks_of_several_devices_multiply_parts_alone() -> None:
    xla_compat.enable_spmd()
    assert xla_compat.num_local_devices() == 2
    assert cpu.library_product() is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_XLA_PP_PRODUCTS", "torch")
        assert cpu.library_product_of_parts.__wrapped__() is multiply_parts
        patch.setenv("TORCH_XLA_PP_PRODUCTS", "xla")
        assert cpu.library_product_of_parts.__wrapped__() is None


def products_of_a_step() -> list[str]:
    """Train a linear layer for a step; return the calls of the library by sides."""
    join()
    with products_of("torch"):
        return trained_products()


def trained_products() -> list[str]:
    targets = []
    register = native.register_target

    def noted(target: str, op: Any) -> None:
        targets.append(target)
        register(target, op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "register_target", noted)
        stage = xpp.PipelineStage(nn.Linear(6, 5), 0, 1, xpp.device())
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, z: (y @ z.t()).sum())
        schedule.step(torch.randn(8, 6), target=torch.randn(8, 5))
    dist.destroy_process_group()
    return [target.removeprefix("torch_xla_pp.") for target in targets]


def test_stages_and_losses_of_one_device_multiply_with_the_library(
    worlds: Worlds,
) -> None:
    (found,) = worlds.run(products_of_a_step, ranks=1, keep_workers=True)
    # How many, rows, depth, columns, and whether a factor is stored turned around:
    # the forward, the loss of 4 rows by 4 targets, and the gradients of both.
    assert {
        "product_bias.1.4.6.5.0.1",
        "product.1.4.5.4.0.1",
        "product.1.5.4.6.1.0",
    } <= {*found}


def product_of(left: Tensor, right: Tensor) -> Tensor:
    return (torch.bmm if left.dim() == 3 else torch.mm)(left, right)


def sum_of_turned(turn: bool, total: Tensor, *factors: Tensor) -> tuple[Tensor]:
    product = product_of(*factors)
    if turn:
        product = product.transpose(-1, -2)
    return (total + product,)


def sums_of_products(name: str) -> None:
    with products_of(name):
        check_sums_of_products()


def check_sums_of_products() -> None:
    torch.manual_seed(0)
    sides = [((rows, depth), (depth, columns)) for rows, depth, columns in SIDES]
    sides += [((b, rows, d), (b, d, columns)) for b, rows, d, columns in BATCHES]
    for left, right in sides:
        factors = torch.randn(left), torch.randn(right)
        for turn in (False, True):
            total = torch.randn_like(product_of(*factors))
            total = total.transpose(-1, -2).contiguous() if turn else total
            check_sum(functools.partial(sum_of_turned, turn), total, *factors)


def check_sum(call: Any, *args: Tensor) -> None:
    """Run a sum that goes into the memory of its first term, if that is donated."""
    module = make_fx(call)(*args)
    assert own_sums(module, args) == 1
    names = ("total", "left", "right")
    function = Function(name="test", module=module, inputs=names, outputs=("out",))
    (want,) = call(*args)
    for donated in ((), ("total",)):
        spec = ProgramSpec(function=function, rules=RULES, donated=donated)
        program = Program(spec)
        for _ in range(2):
            values = [value.to(xla_compat.device()) for value in args]
            got = program(dict(zip(names, values, strict=True)))["out"]
            torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-4)
            if not donated:
                assert torch.equal(values[0].cpu(), args[0])
        size = 0 if donated else want.numel() * 4
        assert program.extra.num_bytes == pytest.approx(size, abs=1 << 11)


def own_sums(module: fx.GraphModule, args: Sequence[Tensor]) -> int:
    """Count the products that are added to a sum in a graph."""
    text = hlo_text(module, args)
    assert '"torch_xla_pp.product.' not in text
    return text.count('"torch_xla_pp.product_sum.')


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_product_is_added_in_the_memory_of_a_sum(worlds: Worlds, name: str) -> None:
    worlds.run(sums_of_products, ranks=1, devices=1, args=(name,), keep_workers=True)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    return (nn.functional.linear(x, weight, bias),)


def linear_of_rows(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    """Compute a linear layer as the graphs of stages do."""
    rows = x.reshape(-1, x.shape[-1]) @ weight.t()
    return (rows.view(*x.shape[:-1], -1) + bias,)


def biased_products(name: str) -> None:
    with products_of(name):
        check_biased_products()


def check_biased_products() -> None:
    torch.manual_seed(0)
    for rows, depth, columns in SIDES:
        x, weight = torch.randn(rows, depth), torch.randn(columns, depth)
        bias = torch.randn(columns)
        for call, shape in (
            (linear, (rows, depth)),
            (linear_of_rows, (rows, depth)),
            (linear_of_rows, (1, rows, depth)),
        ):
            args = x.reshape(shape), weight, bias
            check(call, *args, num_calls=0)
            assert biased_calls(call, args) == 1
    x, y, bias = torch.randn(4, 6), torch.randn(6, 5), torch.randn(5)
    for other in (
        # What is no number for each column alone.
        (lambda x, y, bias: (x @ y + bias[:1],), 1),
        (lambda x, y, bias: (x @ y + bias[None],), 1),
        (lambda x, y, bias: (x @ y + x[:, :1],), 1),
        (lambda x, y, bias: ((x @ y).view(5, 4) + bias[:4],), 1),
        (lambda x, y, bias: (torch.add(x @ y, bias, alpha=2),), 1),
        (lambda x, y, bias: (torch.addmm(bias[:1], x, y),), 1),
        (lambda x, y, bias: (torch.addmm(x[:, :1], x, y),), 1),
        (lambda x, y, bias: ((x @ y).relu() + bias,), 1),
        # The product is computed once, for both of its readers.
        (lambda x, y, bias: ((p := x @ y) * (p + bias),), 1),
        (lambda x, y, bias: (x.double() @ y.double() + bias,), 0),
    ):
        check(other[0], x, y, bias, num_calls=other[1])
        assert biased_calls(other[0], (x, y, bias)) == 0


def beside(
    call: Any, x: Tensor, weight: Tensor, bias: Tensor, other: Tensor
) -> tuple[Tensor]:
    """Add a linear layer to what is beside it, as a transformer does."""
    (y,) = call(x, weight, bias)
    return (other + y,)


def before(
    call: Any, x: Tensor, weight: Tensor, bias: Tensor, other: Tensor
) -> tuple[Tensor]:
    """Add what is read once more to a linear layer."""
    (y,) = call(x, weight, bias)
    return ((y + other) * other,)


def without_bias(x: Tensor, weight: Tensor, _: Tensor, other: Tensor) -> tuple[Tensor]:
    return (other + nn.functional.linear(x, weight),)


def sums_beside(name: str) -> None:
    with products_of(name):
        check_sums_beside()


def check_sums_beside() -> None:
    torch.manual_seed(0)
    for rows, depth, columns in SIDES:
        x, weight = torch.randn(rows, depth), torch.randn(columns, depth)
        bias, other = torch.randn(columns), torch.randn(rows, columns)
        for lead in ((rows,), (1, rows)):
            args = x.reshape(*lead, depth), weight, bias, other.reshape(*lead, columns)
            for own in (linear, linear_of_rows):
                for run in (beside, before):
                    call = functools.partial(run, own)
                    check(call, *args, num_calls=0)
                    assert biased_calls(call, args) == 1
            check(without_bias, *args, num_calls=0)
            assert own_sums(make_fx(without_bias)(*args), args) == 1
    x, weight, bias = torch.randn(4, 6), torch.randn(5, 6), torch.randn(5)
    for call, shape, num_biased in (
        # What is no value like the product.
        (beside, (5,), 1),
        (beside, (4, 1), 1),
        (beside, (3, 4, 5), 1),
        # The linear layer is read twice.
        (lambda *args: (beside(linear, *args)[0] * linear(*args[:3])[0],), (4, 5), 2),
    ):
        run = functools.partial(call, linear) if call is beside else call
        args = x, weight, bias, torch.randn(shape)
        check(run, *args, num_calls=0)
        assert biased_calls(run, args) == num_biased


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_linear_layer_is_added_to_what_is_beside_it(
    worlds: Worlds, name: str
) -> None:
    worlds.run(sums_beside, ranks=1, devices=1, args=(name,), keep_workers=True)


def biased_calls(call: Any, args: Sequence[Tensor]) -> int:
    """Count the products with a bias in the graph of a function."""
    text = hlo_text(make_fx(call)(*args), args)
    return text.count('"torch_xla_pp.product_bias.')


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_product_adds_a_bias_of_its_columns(worlds: Worlds, name: str) -> None:
    worlds.run(biased_products, ranks=1, devices=1, args=(name,), keep_workers=True)


def sums_beside_other_readers() -> None:
    """Run sums of values that are read again, of other terms, and of parts."""
    with products_of("openblas"):
        torch.manual_seed(0)
        total, x, y = torch.randn(4, 5), torch.randn(4, 6), torch.randn(6, 5)
        check_others_of_sums(total, x, y)


def check_others_of_sums(total: Tensor, x: Tensor, y: Tensor) -> None:
    # What is read elsewhere is copied before.
    check(lambda a, x, y: (a * 2 + (a + x @ y),), total, x, y, num_calls=0)
    check(lambda a, x, y: ((a + x @ y) * a,), total, x, y, num_calls=0)
    square = torch.randn(64, 64)
    check(lambda a: (a + a @ a,), square, num_calls=0)
    check(lambda a: (a + a @ a.t(),), square, num_calls=0)
    check(lambda a, x, y: (a * 2 + x @ y,), total, x, y, num_calls=0)
    check(lambda a, x, y: (x @ y + a.exp(),), total, x, y, num_calls=0)
    # One of two products is added to the other.
    check(lambda a, x, y: (x @ y + x.exp() @ y,), total, x, y, num_calls=1)
    check(lambda a, x, y: ((p := x @ y) + p,), total, x, y, num_calls=1)
    # XLA adds these.
    check(lambda a, x, y: (a[0] + x @ y,), total, x, y, num_calls=1)
    check(lambda a, x, y: (a + x @ y,), total[:1], x, y, num_calls=1)
    check(lambda a, x, y: (torch.add(a, x @ y, alpha=2),), total, x, y, num_calls=1)
    check(lambda a, x, y: (a + (x @ y).relu(),), total, x, y, num_calls=1)
    # The product is computed once, for both of its readers.
    check(lambda a, x, y: ((p := x @ y) * (a + p),), total, x, y, num_calls=1)
    check(lambda a, x, y: (a + x @ y,), total.double(), x, y, num_calls=1)


def test_other_sums_are_left_as_they_are(worlds: Worlds) -> None:
    worlds.run(sums_beside_other_readers, ranks=1, devices=1, keep_workers=True)


def is_chosen_by(text: str) -> list[bool]:
    """Return whether the library is used, before and after the variable changes."""
    xla_compat.enable_spmd()
    found = []
    # As in a process that has just begun.
    cpu.library_product.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for value in (text, "torch", "openblas", "xla"):
            patch.setenv("TORCH_XLA_PP_PRODUCTS", value)
            found.append(cpu.library_product() is not None)
    cpu.library_product.cache_clear()
    return found


@pytest.mark.parametrize(
    ("text", "is_used"), [("xla", False), ("torch", True), ("openblas", True)]
)
def test_the_user_has_the_choice_once(worlds: Worlds, text: str, is_used: bool) -> None:
    found = worlds.run(
        is_chosen_by, ranks=1, devices=1, args=(text,), keep_workers=True
    )
    assert found == [[is_used] * 4]
