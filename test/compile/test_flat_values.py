"""Large values that calls of ours write into one, and read there."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch_xla.distributed.spmd as xs
from compile.stages import Compiled, close
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import (
    MARK,
    Function,
    Program,
    ProgramSpec,
    library_rules,
    stage_programs,
)
from torch_xla_pp.compile.flat_values import FlatPart, FlatValue
from torch_xla_pp.compile.names import storage_of
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.native import notes
from torch_xla_pp.testing import Worlds
from torch_xla_pp.xla_compat import ExtraBytes

Values = tuple[Tensor, ...]


class Layer(nn.Module):
    """A layer as a transformer has it, with a loop of XLA's in between."""

    def __init__(self, width: int, heads: int, is_plain: bool) -> None:
        super().__init__()
        self.heads, self.is_plain = heads, is_plain
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        inner = self.up(self.norm_2(x))
        return x + self.down(F.gelu(inner) if self.is_plain else F.silu(inner))


def stage(
    is_plain: bool, width: int = 64
) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """Return two layers with inputs and gradients of outputs."""
    torch.manual_seed(0)
    module = nn.Sequential(*(Layer(width, 2, is_plain) for _ in range(2)))
    shape = 3, 100, width
    return module, [torch.randn(shape) for _ in range(4)], [torch.randn(shape)] * 4


def compiled_stage(module: nn.Module, x: Tensor) -> Compiled:
    mesh = xs.Mesh(np.arange(1), (1,), ("data",))
    example = torch.empty(x.shape, requires_grad=True)
    rules = library_rules()
    return Compiled(module, [example], mesh, rules=rules, is_recycling=True)


def trained(is_plain: bool) -> list[int]:
    """Compare with eager; return how many values a forward has for its backward."""
    xla_compat.enable_spmd()
    module, xs_, grads = stage(is_plain)
    return compared(compiled_stage(module, xs_[0]), module, xs_, grads)


def compared(
    compiled: Compiled, module: nn.Module, xs_: list[Tensor], grads: list[Tensor]
) -> list[int]:
    programs = compiled.programs
    expected = {n: torch.zeros_like(p) for n, p in module.named_parameters()}
    whole = compiled.sum_programs.start(compiled.fixed, {})
    split = compiled.sum_programs.start(compiled.fixed, {})
    sizes, free = [], dict[str, Tensor]()
    # Two microbatches wait for their backward at a time.
    for pair in range(2):
        lives, outputs = [], []
        for i in (2 * pair, 2 * pair + 1):
            names = programs.recycled("forward")
            given = {names[n]: free.pop(n) for n in [*free] if i % 2 == 0}
            done = programs.forward(
                compiled.fixed, {"input:0": compiled.upload(xs_[i]), **given}, 0
            )
            lives.append(done.live)
            outputs.append(done.outputs[0])
            sizes.append(len(done.live))
        for j, i in enumerate((2 * pair, 2 * pair + 1)):
            x = xs_[i].clone().requires_grad_()
            output = module(x)
            assert close(outputs[j], output)
            own = torch.autograd.grad(output, [x, *module.parameters()], grads[i])
            for name, grad in zip(expected, own[1:], strict=True):
                expected[name] += grad
            live = {**lives[j], "tangent:0": compiled.upload(grads[i])}
            found, whole = programs.backward({**compiled.fixed, **whole}, live)
            assert close(found[0], own[0])
            found, residual = programs.backward_input(compiled.fixed, live)
            assert "flat:backward input, late" in residual
            assert close(found[0], own[0])
            split = programs.backward_weight({**compiled.fixed, **split}, residual)
            free = programs.recycled_in(live)
            # What the backward of weights does not read is not passed on to it.
            assert "flat:forward" in live and "flat:forward" not in residual
    for sums in (whole, split):
        apart = compiled.sum_programs.apart(sums)
        for name, want in expected.items():
            assert close(apart[f"sum:param:{name}"], want), name
    assert len({*sizes}) == 1
    return [sizes[0], *parts_of(compiled)]


def parts_of(compiled: Compiled) -> list[int]:
    """Return how many values each flat one has, and check that each begins a line."""
    counts = []
    for flat in compiled.programs._specs.programs["forward"].made_flat:
        parts = sorted(flat.parts.values())
        ends = [part.offset + -(-math.prod(part.shape) // 16) * 16 for part in parts]
        assert [part.offset for part in parts] == [0, *ends[:-1]]
        counts.append(len(parts))
    return counts


@pytest.mark.worlds
def test_what_layers_save_is_in_flat_values(worlds: Worlds) -> None:
    # The input, small values in two, and two flat ones.
    assert worlds.run(trained, ranks=1, args=(True,)) == [[4, 7, 8]]


def summed(is_one: bool) -> dict[str, tuple[tuple[str, ...], ExtraBytes]]:
    """Train layers of weights that are not small.

    Returns:
        What backwards return, and the memory that they take.
    """
    xla_compat.enable_spmd()
    module, xs_, grads = stage(True, width=144)
    limit = stage_programs._MOST_COPIED_BYTES if is_one else 0
    with mock.patch.object(stage_programs, "_MOST_COPIED_BYTES", limit):
        compiled = compiled_stage(module, xs_[0])
    compared(compiled, module, xs_, grads)
    programs = compiled.programs.compiled
    return {
        name: (programs[name].outputs, programs[name].extra)
        for name in ("backward", "backward weight")
    }


@pytest.mark.worlds
def test_sums_of_weights_are_one_value_in_the_memory_of_the_one_before(
    worlds: Worlds,
) -> None:
    (one,) = worlds.run(summed, ranks=1, args=(True,))
    (each,) = worlds.run(summed, ranks=1, args=(False,))
    sums = ("new_sum:flat:sums", "new_sum:small:sums:torch.float32")
    for name, (outputs, extra) in one.items():
        assert outputs[:2] == sums and len(outputs) < 4
        assert len(each[name][0]) == len(outputs) + 7
        # Nothing is copied, and no gradient waits for the sums of others.
        assert extra == each[name][1]


class Parts(nn.Module):
    """An embedding and layers, of which some weights may be in a flat sum."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 160)
        self.first, self.second = nn.Linear(160, 160), nn.Linear(160, 161)
        # Its weight does not end at the end of a line.
        self.third = nn.Linear(161, 163)
        self.small, self.up, self.down = (
            nn.Linear(163, 8),
            nn.Linear(163, 1616),
            nn.Linear(1616, 16),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.third(self.second(self.first(self.embed(tokens))))
        result: Tensor = self.down(self.up(found)).mean() + self.small(found).mean()
        return result


def in_flat_sums(most_bytes: int) -> list[str]:
    """Return the sums that are one if they may take so many bytes together."""
    xla_compat.enable_spmd()
    tokens = torch.zeros(20, dtype=torch.int64)
    mesh, rules = xs.Mesh(np.arange(1), (1,), ("data",)), library_rules()
    with mock.patch.object(stage_programs, "_MOST_FLAT_BYTES", most_bytes):
        compiled = Compiled(Parts(), [tokens], mesh, rules=rules, is_recycling=True)
    bundles = compiled.programs.summed.bundles
    assert len(bundles) < 3
    return [name for bundle in bundles[1:] for name in bundle.shapes]


@pytest.mark.worlds
def test_sums_of_few_bytes_are_one(worlds: Worlds) -> None:
    names = [f"sum:param:{name}.weight" for name in ("first", "second", "down")]
    sizes = [160 * 160 * 4, 160 * 161 * 4, 1616 * 16 * 4]
    for count, most_bytes in ((3, sum(sizes)), (2, sum(sizes) - 1), (0, sizes[0])):
        found = worlds.run(in_flat_sums, ranks=1, args=(most_bytes,))
        assert found == [names[:count]]


@pytest.mark.worlds
def test_what_loops_read_is_in_none(worlds: Worlds) -> None:
    # Of each layer what `silu` reads, and what it gives to a product.
    assert worlds.run(trained, ranks=1, args=(False,)) == [[8, 5, 6]]


def program_of(
    call: Callable[..., Values], args: Sequence[Tensor], **others: Any
) -> Program:
    module = make_fx(call)(*args)
    names = tuple(f"x{i}" for i in range(len(args)))
    outputs = tuple(f"out{i}" for i in range(len(call(*args))))
    function = Function(name="test", module=module, inputs=names, outputs=outputs)
    return Program(ProgramSpec(function=function, rules=library_rules(), **others))


def written(call: Callable[..., Values], *args: Tensor) -> set[str]:
    """Run a function that may return all in two flat values; return what it has."""
    want = call(*args)
    names = [f"out{i}" for i in range(len(want))]
    flat = [
        FlatValue(name="even", names=names[::2]),
        FlatValue(name="odd", names=names[1::2]),
    ]
    recycled = (*names, "even", "odd")
    program = program_of(call, args, made_flat=flat, recycled=recycled)
    values = {f"x{i}": x.to(xla_compat.device()) for i, x in enumerate(args)}
    results = program(values)
    first = program.extra.num_bytes
    for _ in range(2):
        found = {name: x.cpu() for name, x in results.items()}
        for one in flat:
            found |= one.taken_apart(found[one.name]) if one.parts else {}
        for name, value in zip(names, want, strict=True):
            torch.testing.assert_close(found[name], value, rtol=2e-6, atol=1e-5)
        assert found.keys() == {*names, *(one.name for one in flat if one.parts)}
        # All is written to the memory of what was there before, and not copied.
        again = {storage_of(name): x for name, x in results.items()}
        results = program({**values, **again})
        size = sum(x.numel() * x.itemsize for x in results.values())
        assert program.extra.num_bytes <= first - size + (1 << 11)
    return {name for one in flat for name in one.parts}


def chain(x: Tensor) -> Values:
    first = F.gelu(x)
    second = F.gelu(first)
    third = F.gelu(second)
    return first, second, third, F.gelu(third)


def loops(x: Tensor) -> Values:
    first = F.gelu(x)
    second = F.gelu(first)
    third = F.gelu(second)
    return first, second, third, third.exp(), F.gelu(second * 2)


def turned(x: Tensor, y: Tensor) -> Values:
    first, second = F.gelu(x), F.gelu(y)
    third = F.gelu(first.t().t().reshape(-1))
    # Its second factor is read as it lies, and so is what the copy turns.
    return first, second, third, first @ second.t(), second.t().contiguous()


def rows(x: Tensor, weight: Tensor) -> Values:
    mean = x.mean(-1, keepdim=True)
    scale = torch.rsqrt((x - mean).pow(2).mean(-1, keepdim=True) + 1e-5)
    normal = (x - mean) * scale * weight
    scores = torch.softmax(normal, -1)
    return mean, scale, normal, scores, F.gelu(scores)


def twice(x: Tensor) -> Values:
    first = F.gelu(x)
    second = F.gelu(first)
    return first, second, first.view(-1), F.gelu(second), second.t()


def added(x: Tensor, y: Tensor) -> Values:
    first = F.gelu(x)
    second = F.gelu(first)
    # The sum takes the memory of its first term, which is copied before.
    return first, second, first + y @ y.t(), F.gelu(second), x > 0


def alone(x: Tensor) -> Values:
    return F.gelu(x), x.exp(), x.sin()


def pieces_written() -> dict[str, set[str]]:
    xla_compat.enable_spmd()
    torch.manual_seed(0)
    x, y = torch.randn(37, 41), torch.randn(37, 41)
    return {
        "chain": written(chain, x),
        "loops": written(loops, x),
        "turned": written(turned, x, y),
        "rows": written(rows, x, torch.randn(41)),
        "twice": written(twice, x),
        "added": written(added, torch.randn(29, 29), torch.randn(29, 29)),
        "alone": written(alone, x),
        "integers": written(lambda x: (*chain(x), x.long(), x > 0, x.double()), x),
        "large": written(chain, torch.randn(1500, 700)),
    }


@pytest.mark.worlds
def test_results_that_calls_alone_make_and_read_are_written_into_one(
    worlds: Worlds,
) -> None:
    four = {"out0", "out1", "out2", "out3"}
    assert worlds.run(pieces_written, ranks=1) == [
        {
            "chain": four,
            # Loops read two of the three of the even ones.
            "loops": {"out0", "out4"},
            "turned": {"out0", "out1", "out2", "out3", "out4"},
            "rows": {"out0", "out1", "out2", "out3", "out4"},
            # Of the odd ones, one is returned in another order as well.
            "twice": set(),
            "added": {"out1", "out3"},
            "alone": set(),
            "integers": four,
            "large": four,
        }
    ]


def calls_of(x: Tensor, y: Tensor, total: Tensor) -> Values:
    return F.gelu(x), x @ y, y.exp() + 1, total + y.t() @ x.t(), torch.softmax(y, -1)


def pieces_read() -> None:
    """Read pieces by calls and by loops, and values of their own at other calls."""
    xla_compat.enable_spmd()
    torch.manual_seed(0)
    args = torch.randn(31, 33), torch.randn(33, 31), torch.randn(31, 31)
    flat = FlatValue(name="both", names=["x0", "x1"])
    flat.note({"x1": FlatPart(5, (33, 31)), "x0": FlatPart(5 + 33 * 31, (31, 33))})
    program = program_of(calls_of, args, given_flat=[flat], donated=("x2",))
    for attempt in range(4):
        x, y, total = (torch.randn_like(x) for x in args)
        whole = torch.cat([torch.randn(5), y.flatten(), x.flatten(), torch.randn(3)])
        given = {"both": whole} if attempt % 2 == 0 else {"x0": x, "x1": y}
        values = {**given, "x2": total}
        device = {name: x.to(xla_compat.device()) for name, x in values.items()}
        results = program(device)
        for name, want in zip(results, calls_of(x, y, total), strict=True):
            torch.testing.assert_close(results[name].cpu(), want, rtol=2e-5, atol=1e-5)
    assert program.inputs == ("both", "x2")


@pytest.mark.worlds
def test_pieces_are_read_where_they_lie(worlds: Worlds) -> None:
    worlds.run(pieces_read, ranks=1)


def products(x: Tensor, y: Tensor, *totals: Tensor) -> Values:
    first, second, third, fourth = totals
    turned = (y @ y.t()).t()
    return first + x @ y, second + y.t() @ x.t(), third + turned, fourth + y @ y


def read_again(x: Tensor, y: Tensor, *totals: Tensor) -> Values:
    first, second, third, fourth = totals
    total = first + x @ y
    # Its old value is read by a call, that of the next one by a loop, and the new value
    # of the last one by both.
    other = second + F.gelu(second[0])
    last = fourth + y @ y.t()
    gelu = F.gelu(last)
    return total + first @ y @ x, other, third * second, last, gelu, last.exp()


def exchanged(x: Tensor, y: Tensor, *totals: Tensor) -> Values:
    first, second, third, fourth = totals
    return second + x @ y, first + y @ x, fourth, third


def given_twice(x: Tensor, y: Tensor, *totals: Tensor) -> Values:
    first, second, third, fourth = totals
    total = first + x @ y
    return total, second, total, fourth + y @ y.t(), total


def pieces_replaced() -> dict[str, int]:
    """Replace pieces of a flat value; return what programs take beside it."""
    xla_compat.enable_spmd()
    torch.manual_seed(0)
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    calls: list[Callable[..., Values]] = [products, read_again, exchanged, given_twice]
    found = {}
    for call in calls:
        # Something lies before, between and behind its parts.
        parts = {f"x{2 + i}": FlatPart(16 + 5000 * i, (64, 64)) for i in range(4)}
        new = {f"out{i}": part for i, part in enumerate(parts.values())}
        old = FlatValue(name="old", names=[*parts], parts=parts)
        args = x, y, *torch.randn(4, 64, 64)
        program = program_of(
            call,
            args,
            given_flat=[old],
            updated_flat={"old": FlatValue(name="new", names=[*new], parts=new)},
            donated=("old",),
        )
        expected = torch.randn(20016)
        whole = expected.to(xla_compat.device())
        for _ in range(3):
            left, right = x * torch.rand(()), y * torch.rand(())
            totals = [part.of(expected).clone() for part in parts.values()]
            wanted = call(left, right, *totals)
            for part, value in zip(parts.values(), wanted, strict=False):
                part.of(expected).copy_(value)
            device = {"x0": left.to(whole.device), "x1": right.to(whole.device)}
            results = program({**device, "old": whole})
            whole = results["new"]
            assert [*results] == ["new", *(f"out{i}" for i in range(4, len(wanted)))]
            pairs = [(whole, expected)]
            pairs += zip([*results.values()][1:], wanted[4:], strict=True)
            for got, want in pairs:
                torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-3)
            expected /= expected.abs().max()
            whole = expected.to(whole.device)
        found[call.__name__] = program.extra.num_bytes
    return found


@pytest.mark.worlds
def test_results_replace_pieces_of_a_parameter(worlds: Worlds) -> None:
    (found,) = worlds.run(pieces_replaced, ranks=1)
    # Sums of products are written where they lie.
    assert found["products"] < 64 * 64


def noted() -> dict[str, tuple[int, int, ExtraBytes, ExtraBytes]]:
    """Run programs that note when they have ended, and others.

    Returns:
        How many values either returns, and the memory that they take beside these.
    """
    xla_compat.enable_spmd()
    module, xs_, grads = stage(True, width=144)
    compiled = compiled_stage(module, xs_[0])
    programs = compiled.programs
    found, extra = [], []
    for marks in ({}, {MARK: notes.mark("B", 0, 0)}):
        live = {"input:0": compiled.upload(xs_[0]), **marks}
        done = programs.forward(compiled.fixed, live, 0)
        extra.append([programs.extra])
        sums = compiled.sum_programs.start(compiled.fixed, {})
        live = {**done.live, "tangent:0": compiled.upload(grads[0]), **marks}
        grad, sums = programs.backward({**compiled.fixed, **sums}, live)
        extra[-1].append(programs.extra)
        apart = compiled.sum_programs.apart(sums)
        found.append([x.cpu() for x in (done.outputs[0], grad[0], *apart.values())])
    assert all(map(torch.equal, *found))
    return {
        name: (len(one.outputs), len(one._marked.outputs), *sizes)
        for (name, one), *sizes in zip(programs.compiled.items(), *extra, strict=True)
    }


@pytest.mark.worlds
def test_what_waits_for_pieces_lets_them_be_pieces(worlds: Worlds) -> None:
    (found,) = worlds.run(noted, ranks=1)
    assert [*found] == ["forward", "backward"]
    for num_values, num_noted, extra, noted_extra in found.values():
        # A token more, and no copies.
        assert num_noted == num_values + 1
        assert abs(noted_extra.num_bytes - extra.num_bytes) <= 1 << 10


def dispatched() -> None:
    """Check what programs take as one, and that nothing is compiled later."""
    xla_compat.enable_spmd()
    module, xs_, grads = stage(True)
    compiled = compiled_stage(module, xs_[0])
    programs = compiled.programs
    sums, counts = compiled.sum_programs.start(compiled.fixed, {}), list[int]()
    for i in range(3):
        done = programs.forward(compiled.fixed, {"input:0": compiled.upload(xs_[i])}, 0)
        live = {**done.live, "tangent:0": compiled.upload(grads[i])}
        _, sums = programs.backward({**compiled.fixed, **sums}, live)
        counts.append(xla_compat.num_compilations())
    assert len({*counts}) == 1
    made = programs.compiled["forward"].outputs
    assert {"flat:forward", "flat:forward, late"} <= {*made}
    assert len(made) == 4


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.layer = nn.Dropout(0.5), Layer(64, 2, is_plain=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(self.drop(x))
        return result


def dropped() -> None:
    """Check that random numbers follow the seed of each call."""
    xla_compat.enable_spmd()
    torch.manual_seed(0)
    x = torch.randn(3, 100, 64)
    compiled = compiled_stage(Dropped(), x)
    live = {"input:0": compiled.upload(x)}
    outputs = [
        compiled.programs.forward(compiled.fixed, live, seed).outputs[0].cpu()
        for seed in (1, 2, 1, 3)
    ]
    assert sum(parts_of(compiled)) > 2
    assert outputs[0].equal(outputs[2])
    assert not outputs[0].equal(outputs[1]) and not outputs[1].equal(outputs[3])


@pytest.mark.worlds
def test_random_numbers_follow_the_seed(worlds: Worlds) -> None:
    worlds.run(dropped, ranks=1)


@pytest.mark.worlds
def test_a_forward_returns_few_values(worlds: Worlds) -> None:
    worlds.run(dispatched, ranks=1)


@pytest.mark.pure
def test_what_is_in_a_flat_value_stays() -> None:
    flat = FlatValue(name="flat:forward", names=["a", "b"])
    parts = {"a": FlatPart(0, (2, 3)), "b": FlatPart(6, ())}
    flat.note(parts)
    flat.note(dict(parts))
    whole = torch.arange(9.0)
    found = flat.taken_apart(whole)
    assert found["a"].equal(torch.arange(6.0).view(2, 3)) and found["b"].item() == 6
    message = "flat:forward: expected it to hold a, b as in the programs before, got a"
    with pytest.raises(PipelineError, match=re.escape(message)):
        flat.note({"a": parts["a"]})
