"""Pipelines of any size are compiled for devices that are not here."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting.small_model import ROWS, TOPOLOGY, Block, Recorder, fit_model
from torch import Tensor
from torch.nn.functional import mse_loss

import torch_xla_pp as xpp
from torch_xla_pp import xla_compat
from torch_xla_pp.accelerators import (
    AcceleratorCompiler,
    CompiledProgram,
    CompilerLibrary,
    Slice,
)
from torch_xla_pp.compile import AbstractValue, Program
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.fitting import StageFit
from torch_xla_pp.hlo import REPLICATED
from torch_xla_pp.mesh import presets
from torch_xla_pp.protobuf import fields_of, messages
from torch_xla_pp.schedule import gpipe, one_f_one_b, zb1p

pytestmark = pytest.mark.xla

TP = presets.tp("model") | xpp.AxisRules(
    parameters={"*up.weight": ("mlp", "embed"), "*down.weight": ("embed", "mlp")}
)


def names(stage: StageFit) -> list[str]:
    return [found.name for found in stage.programs]


def test_each_stage_has_the_programs_that_its_schedule_runs() -> None:
    found = fit_model(Recorder())
    assert names(found.stages[0]) == ["forward", "backward", "gradient reduction"]
    assert names(found.stages[1])[:3] == ["forward", "loss", "backward"]
    split = fit_model(Recorder(), schedule=zb1p(2, 4, 1))
    assert names(split.stages[1])[2:4] == ["backward input", "backward weight"]


def test_a_model_of_any_size_takes_no_memory() -> None:
    width = 2**20
    found = fit_model(Recorder(), width, optimizer=3, target=None)
    one = 2 * 4 * width * width * 4
    for stage in found.stages:
        assert stage.parameter_bytes == one > 2**44
        assert stage.optimizer_bytes == 3 * one
        assert stage.gradient_bytes == one
    assert not found.fits
    assert found.ranks[0].state_bytes == 5 * one


def test_values_are_sharded_as_the_rules_say() -> None:
    compiler = Recorder()
    found = fit_model(compiler, mesh={"model": 2}, sharding=TP)
    assert found.stages[0].parameter_bytes == 2 * 4 * 64 * 64 * 4 // 2
    _, shardings, donated = compiler.asked[0]
    assert sorted(shardings) == [
        "{devices=[1,2]0,1}",
        "{devices=[2,1]0,1}",
        "{replicated}",
    ]
    assert donated == []
    _, shardings, donated = compiler.asked[1]
    # The backward adds to sums, and takes their buffers.
    given = sorted(shardings[number] for number in donated)
    assert given == ["{devices=[1,2]0,1}", "{devices=[2,1]0,1}"]


def test_rows_are_split_over_the_data_axis() -> None:
    compiler = Recorder()
    found = fit_model(compiler)
    assert found.mesh == {"data": 2}
    _, shardings, _ = compiler.asked[0]
    assert shardings.count("{devices=[2,1]0,1}") == 1
    (forward, *_) = found.stages[0].programs
    assert forward.received_bytes == ROWS * 64 * 4 // 2


def test_what_is_not_the_same_everywhere_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 4 CPU devices in the place of"):
        fit_model(Recorder(), topology="v5e:2x2")
    with pytest.raises(ValueError, match="expected a mesh over the 2 devices of v5e"):
        fit_model(Recorder(), mesh={"data": 2, "model": 2})
    with pytest.raises(ValueError, match="expected a model of 3 stages, as the sched"):
        fit_model(Recorder(), schedule=gpipe(3, 4))


def test_stages_that_are_modules_are_taken_as_they_are() -> None:
    traced = fit_model(Recorder())
    with torch.device("meta"):
        stages, x = [Block(64), Block(64)], torch.zeros(ROWS, 64)
    found = xpp.fit(
        stages,
        (x,),
        topology=TOPOLOGY,
        schedule=one_f_one_b(2, 4),
        loss_fn=mse_loss,
        target=x,
        compiler=Recorder(),  # type: ignore[arg-type]
    )
    assert found == traced


def test_what_stages_make_for_others_is_noted() -> None:
    first, last = fit_model(Recorder()).stages
    (flow,) = first.flows
    assert (flow.producer, flow.consumers, flow.has_gradient) == (0, (1,), True)
    assert flow.num_bytes == ROWS * 64 * 4
    assert last.flows == ()


def test_a_backward_is_not_tried_without_its_forward() -> None:
    class Refusing(Recorder):
        def compile(self, *args: Any, **options: Any) -> CompiledProgram:
            return CompiledProgram(error="out of order")

    found = fit_model(Refusing())
    assert found.stages[0].programs[0].compiled.error == "out of order"
    assert "not tried: what makes its" in found.stages[0].programs[1].compiled.error


def operations(module: bytes) -> Counter[bytes]:
    """Count the instructions of a module, without annotations."""
    rows = [row for one in messages(module, 3) for row in messages(one, 2)]
    found = (dict(fields_of(row)) for row in rows)
    return Counter(row[2] for row in found if row.get(28) != b"Sharding")  # type: ignore[misc]


def test_a_program_is_written_as_it_is_when_it_runs(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compile.stages import Compiled

    compiled = Compiled(Block(8), [torch.zeros(4, 8, requires_grad=True)], mesh)
    seen: list[bytes] = []
    compile_graph = xla_compat.compile_graph

    def spy(outputs: list[Tensor]) -> Any:
        seen.append(xla_compat.hlo_module(outputs))
        return compile_graph(outputs)

    monkeypatch.setattr(xla_compat, "compile_graph", spy)
    program: Program = compiled.programs.all_programs["forward"]
    looks = {
        name: AbstractValue(tuple(value.shape), value.dtype, REPLICATED)
        for name, value in {**compiled.fixed, "input:0": torch.zeros(4, 8)}.items()
    }
    lowered = program.lowered({name: looks[name] for name in program.inputs})
    assert not program.is_compiled
    rows = torch.zeros(4, 8, device=xla_compat.device())
    xla_compat.annotate(rows, compiled.whole)
    xla_compat.materialize([rows])
    program({**compiled.fixed, "input:0": rows})
    assert operations(lowered.hlo) == operations(seen[0])
    assert sorted(lowered.parameters) == sorted(looks)
    assert set(lowered.outputs) == set(program.outputs)


def has_library() -> bool:
    try:
        CompilerLibrary.find()
    except PipelineError:
        return False
    return True


@pytest.mark.skipif(not has_library(), reason="libtpu is not installed")
@pytest.mark.parametrize("rules", [None, TP], ids=["dp", "tp"])
def test_a_pipeline_is_compiled_for_a_tpu(tmp_path: Path, rules: Any) -> None:
    compiler = AcceleratorCompiler(Slice.parse(TOPOLOGY), cache=tmp_path)
    mesh = {"model" if rules else "data": 2}
    found = fit_model(compiler, 256, mesh=mesh, sharding=rules)
    assert found.fits, str(found)
    forward, backward = found.stages[0].programs[:2]
    assert forward.compiled.num_bytes is not None
    assert backward.compiled.num_bytes is not None
    for program in (p for stage in found.stages for p in stage.programs):
        assert program.values is not None
        assert program.values.agrees(program.compiled), program
    # These shapes need no padding.
    one = found.stages[0]
    assert forward.compiled.num_bytes.arguments == (
        one.parameter_bytes + forward.received_bytes
    )
    assert backward.compiled.num_bytes.aliased == one.gradient_bytes
    assert forward.time is not None and found.step is not None
    assert forward.compiled.cycles > 0
    assert found.step.seconds["0F"] == forward.time.seconds
    kinds = [(c.kind, c.axes) for c in forward.collectives]
    assert kinds == ([("all-reduce", ("model",))] if rules else [])
    reduced = found.stages[0].programs[2:]
    names = [(p.name, c.kind, c.axes) for p in reduced for c in p.collectives]
    expected = [("gradient reduction", "all-reduce", ("data",))]
    assert names == ([] if rules else expected)


class Mixed(Block):
    """A block whose first product is made for three, and cut."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.up = torch.nn.Linear(width, 3 * width, bias=False)
        self.down = torch.nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.up(x).chunk(3, dim=-1)
        return x + self.down(q * k.sigmoid() + v)


@pytest.mark.skipif(not has_library(), reason="libtpu is not installed")
def test_a_weight_for_three_that_is_split_is_a_surprise(tmp_path: Path) -> None:
    with torch.device("meta"):
        model, x = Mixed(256), torch.zeros(ROWS, 256)
    found = xpp.fit(
        model,
        (x,),
        topology=TOPOLOGY,
        schedule=gpipe(1, 1),
        mesh={"model": 2},
        sharding=TP,
        compiler=AcceleratorCompiler(Slice.parse(TOPOLOGY), cache=tmp_path),
    )
    (forward, *_) = found.stages[0].programs
    (text, *_) = forward.surprises
    assert "collective-permute" in text and "aten.split" in text
    assert f"{Path(__file__).name}:" in text and "in forward" in text
    assert f"SURPRISE: {text}" in str(found)
