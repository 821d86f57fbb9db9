"""Each guard of a program, with a case that gives wrong numbers without it."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from compile.stages import Compiled
from torch import Tensor, fx, nn

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import MARK, Function, Program, ProgramSpec, storage_of
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.native import Event, notes

pytestmark = pytest.mark.xla

ROWS = ("data", None)


def function(call: Any, inputs: tuple[str, ...]) -> Function:
    """Wrap a Python function of XLA tensors."""
    module = fx.symbolic_trace(call)
    return Function(name="test", module=module, inputs=inputs, outputs=("out",))


def program_of(function: Function, **others: Any) -> Program:
    return Program(ProgramSpec(function=function, **others))


def upload(mesh: Any, value: Tensor, partition: tuple[Any, ...]) -> Tensor:
    data = value.to(xla_compat.device())
    xla_compat.annotate(data, mesh.get_op_sharding(partition))
    xla_compat.materialize([data])
    return data


def add(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return (x + 2 * y,)


def test_arguments_are_not_mixed_up_when_traced_as_one_value(mesh: Any) -> None:
    program = program_of(function(add, ("x", "y")))
    same = upload(mesh, torch.ones(4, 4), ("data", None))
    assert program({"x": same, "y": same})["out"].cpu().eq(3).all()
    other = upload(mesh, torch.full((4, 4), 5.0), ("data", None))
    assert program({"x": same, "y": other})["out"].cpu().eq(11).all()
    assert program({"x": other, "y": same})["out"].cpu().eq(7).all()


def test_arguments_are_mapped_again_after_another_trace_with_them(mesh: Any) -> None:
    """Mapping by tensor id, as torch_xla's dynamo bridge does, fails here."""
    x = upload(mesh, torch.ones(4, 4), ("data", None))
    y = upload(mesh, torch.ones(4, 4), ("data", None))
    values = {"x": x, "y": y}
    program_of(function(add, ("x", "y")))(values)
    program = program_of(function(add, ("y", "x")))
    program(values)
    changed = {"x": upload(mesh, torch.full((4, 4), 3.0), ("data", None)), "y": y}
    assert program(changed)["out"].cpu().eq(1 + 2 * 3).all()


def left(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return ((x - y).sum() * x,)


def right(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return ((x - y).sum() * y,)


def test_programs_that_use_another_operand_twice_are_told_apart(mesh: Any) -> None:
    """torch_xla's hash of a graph is the same for both."""
    x = upload(mesh, torch.full((4, 4), 3.0), ROWS)
    y = upload(mesh, torch.ones(4, 4), ROWS)
    for call, expected in ((left, 96), (right, 32), (left, 96)):
        program = program_of(function(call, ("x", "y")))
        for _ in range(2):
            assert program({"x": x, "y": y})["out"].cpu().eq(expected).all()


def test_equal_programs_are_compiled_once(mesh: Any) -> None:
    x, y = (upload(mesh, torch.ones(4, 4), ROWS) for _ in range(2))
    values = {"x": x, "y": y}
    program_of(function(left, ("x", "y")))(values)
    before = xla_compat.num_compilations()
    program_of(function(left, ("x", "y")))(values)
    assert xla_compat.num_compilations() == before


def test_what_a_failed_trace_has_left_is_not_computed_later(mesh: Any) -> None:
    """A receive among it would wait for ever."""
    kept: list[weakref.ref[Tensor]] = []

    def fail(x: Tensor) -> tuple[Tensor]:
        pending = x + 1
        kept.append(weakref.ref(pending))
        raise RuntimeError("cannot be traced")

    x = upload(mesh, torch.ones(4, 4), ROWS)
    module = nn.Module()
    module.forward = fail  # type: ignore[assignment]
    failing = Function(name="test", module=module, inputs=("x",), outputs=("out",))
    with pytest.raises(RuntimeError, match="cannot be traced") as caught:
        program_of(failing)({"x": x})
    assert caught.value.__traceback__ is not None
    assert [pending() for pending in kept] == [None]


def test_a_captured_tensor_is_refused(mesh: Any) -> None:
    hidden = upload(mesh, torch.ones(4, 4), ("data", None))
    module = nn.Module()
    module.hidden = hidden  # type: ignore[assignment]
    graph = fx.Graph()
    x = graph.placeholder("x")
    captured = graph.get_attr("hidden")
    graph.output((graph.call_function(torch.add, (x, captured)),))
    captured_function = Function(
        name="test",
        module=fx.GraphModule(module, graph),
        inputs=("x",),
        outputs=("out",),
    )
    program = program_of(captured_function)
    with pytest.raises(PipelineError, match=r"captured constants: .*float32 \[4, 4\]"):
        program({"x": upload(mesh, torch.ones(4, 4), ("data", None))})


def test_another_input_sharding_is_refused(mesh: Any) -> None:
    program = program_of(function(add, ("x", "y")), checked=("x", "y"))
    rows = upload(mesh, torch.ones(4, 4), ("data", None))
    columns = upload(mesh, torch.arange(16.0).reshape(4, 4), (None, "data"))
    program({"x": rows, "y": rows})
    expected = r"y: expected \{devices=\[2,1\]0,1\}, got \{devices=\[1,2\]0,1\}"
    with pytest.raises(PipelineError, match=expected):
        program({"x": rows, "y": columns})


@pytest.mark.parametrize("partition", [("data", None), (None, "data"), (None, None)])
def test_outputs_have_the_sharding_they_are_pinned_to(
    mesh: Any, partition: tuple[Any, ...]
) -> None:
    sharding = mesh.get_op_sharding(partition)
    program = program_of(function(add, ("x", "y")), pins={"out": sharding})
    rows = upload(mesh, torch.ones(4, 4), ("data", None))
    like = upload(mesh, torch.ones(4, 4), partition)
    out = program({"x": rows, "y": rows})["out"]
    assert xla_compat.sharding_texts([out]) == xla_compat.sharding_texts([like])


def test_a_marked_program_notes_its_times_and_computes_the_same(mesh: Any) -> None:
    program = program_of(
        function(add, ("x", "y")), pins={"out": mesh.get_op_sharding(ROWS)}
    )
    values = {name: upload(mesh, torch.randn(4, 4), ROWS) for name in "xy"}
    plain = program(values)["out"].cpu()
    for _ in range(2):
        notes.start()
        out = program({**values, MARK: notes.mark("W", 2, 3)})["out"]
        xla_compat.flush()
        records = notes.stop()
        assert notes.mark.cache_info().currsize == 0
        assert torch.equal(out.cpu(), plain)
        assert {r[2:5] for r in records} == {("W", 2, 3)}
        times = {e: [r.time_ns for r in records if r.event is e] for e in Event}
        assert len(times[Event.BEGAN]) == len(times[Event.ENDED]) == 2
        assert min(times[Event.BEGAN]) < max(times[Event.ENDED])
    program({**values, MARK: notes.mark("W", 2, 3)})
    xla_compat.flush()
    assert notes.stop() == []


def test_nothing_is_compiled_after_the_first_call(mesh: Any) -> None:
    import torch_xla.debug.metrics as metrics

    compiled = Compiled(nn.Linear(8, 8), [torch.zeros(4, 8)], mesh)
    for i in range(4):
        x = compiled.upload(torch.randn(4, 8))
        compiled.forward([x], 0)
        if i == 0:
            metrics.clear_all()
    for name in ("UncachedCompile", "CreateCompileHandles", "ReplicateShardedData"):
        assert not metrics.counter_value(name), name


def halved(x: Tensor) -> tuple[Tensor]:
    return (x / 2,)


@pytest.mark.parametrize(("donated", "shares"), [((), 1), (("x",), 0)])
def test_a_program_says_what_it_takes_beside_its_arguments_on_a_device(
    mesh: Any, donated: tuple[str, ...], shares: int
) -> None:
    program = program_of(
        function(halved, ("x",)),
        pins={"out": mesh.get_op_sharding(ROWS)},
        donated=donated,
    )
    assert program.extra.num_bytes == 0
    program({"x": upload(mesh, torch.ones(1024, 512), ROWS)})
    share = 4 * 1024 * 512 // 2
    assert program.extra.num_bytes == pytest.approx(shares * share, abs=1 << 11)
    # Another program of an equal graph is not compiled again.
    again = program_of(
        function(halved, ("x",)),
        pins={"out": mesh.get_op_sharding(ROWS)},
        donated=donated,
    )
    again({"x": upload(mesh, torch.ones(1024, 512), ROWS)})
    assert again.extra == program.extra


def test_a_result_takes_the_memory_of_an_earlier_one(mesh: Any) -> None:
    program = program_of(function(halved, ("x",)), recycled=("out",))
    whole = 4 * 512 * 512
    x = upload(mesh, torch.ones(512, 512), (None, None))
    first = program({"x": x})["out"]
    assert program.extra.num_bytes == pytest.approx(whole, abs=1 << 11)
    y = upload(mesh, torch.full((512, 512), 3.0), (None, None))
    second = program({"x": y, storage_of("out"): first})["out"]
    assert program.extra.num_bytes == pytest.approx(0, abs=1 << 11)
    third = program({"x": x})["out"]
    assert program.extra.num_bytes == pytest.approx(whole, abs=1 << 11)
    assert second.cpu().eq(1.5).all()
    assert third.cpu().eq(0.5).all()
    with pytest.raises(RuntimeError):
        first.cpu()


def squared(x: Tensor) -> tuple[Tensor]:
    number = torch.view_as_complex(x)
    return (torch.view_as_real(number * number),)


def test_parts_of_complex_values_take_the_memory_of_earlier_ones(mesh: Any) -> None:
    program = program_of(function(squared, ("x",)), recycled=("out",))
    x = upload(mesh, torch.ones(4, 2), (None, None))
    first = program({"x": x})["out"]
    y = upload(mesh, torch.full((4, 2), 3.0), (None, None))
    second = program({"x": y, storage_of("out"): first})["out"]
    assert second.cpu().equal(torch.tensor([0.0, 18.0]).expand(4, 2))
    with pytest.raises(RuntimeError):
        first.cpu()


def test_analyses_are_found_that_leave_out_the_first_zeros_of_a_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = "Analysis: {} size: {} GB\n"
    texts = [
        f"Analysis:   Graph Hash: {number}\n"
        + sizes.format("Graph output", size)
        + sizes.format("Aliased Input", "0.000000")
        + sizes.format("Intermediate tensor", "0.000000")
        for number, size in [("1542d0", "0.250000"), ("1542d0aa", "0.500000")]
    ]
    file = tmp_path / "analyses"
    file.write_text("".join(texts))
    monkeypatch.setenv("PT_XLA_DEBUG_FILE", str(file))
    graph_hash = xla_compat.GraphHash(bytes.fromhex("001542d0")[::-1])
    assert xla_compat._extra_of(graph_hash).results == 1 << 28
