"""The works of a model are compiled one by one, and planned with."""

import math
from collections.abc import Sequence

import pytest
import torch
from fitting.small_model import Recorder
from torch import nn
from torch.nn.functional import mse_loss

import torch_xla_pp as xpp
from torch_xla_pp.accelerators import CHIPS, CompiledProgram, ProgramBytes
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.fitting import compile_work
from torch_xla_pp.planner import MeasuredCosts, make_plan
from torch_xla_pp.protobuf import integers_of, messages
from torch_xla_pp.testing import Worlds
from torch_xla_pp.work import WorkGraph

pytestmark = pytest.mark.worlds

ROWS, WIDTH, INNER = 8, 64, 256


class Counting(Recorder):
    """A compiler that says that a program takes a cycle for each number it is given."""

    error = ""
    whole = 0

    def compile(
        self, hlo: bytes, *, shardings: Sequence[str], donated: Sequence[int]
    ) -> CompiledProgram:
        if self.error:
            return CompiledProgram(error=self.error)
        signature = messages(hlo, 4)[0]
        shapes = [integers_of(shape, 3) for shape in messages(signature, 1)]
        none = ProgramBytes(arguments=0, outputs=0, aliased=0, temporaries=0, code=0)
        cycles = sum(math.prod(shape) for shape in shapes if len(shape) > 1)
        if shapes.count((INNER, WIDTH)) and shapes.count((WIDTH, INNER)):
            if self.whole < 0:
                return CompiledProgram(error="too large")
            self.whole += 1
            cycles //= 2
        return CompiledProgram(num_bytes=none, cycles=cycles, num_timed=1)


def traced() -> tuple[WorkGraph, nn.Module, tuple[torch.Tensor, ...]]:
    with torch.device("meta"):
        layers = [nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH)]
        model, x = nn.Sequential(*layers), torch.zeros(ROWS, WIDTH)
    work = xpp.trace_work(model, (x,), loss_fn=mse_loss, target=x)
    return work, model, (x,)


def compiled() -> tuple[str, str, str, str]:
    work, model, args = traced()
    compiler = Counting("v5e:1x1")

    def costs() -> MeasuredCosts:
        return compile_work(
            work,
            model,
            args,
            chip="v5e",
            loss_fn=mse_loss,
            target=args[0],
            compiler=compiler,  # type: ignore[arg-type]
        )

    joined = costs()
    compiler.whole = -1
    alone = costs()
    compiler.error = "no"
    with pytest.raises(PipelineError) as caught:
        costs()
    return work.to_json(), joined.to_json(), alone.to_json(), str(caught.value)


def test_works_take_what_their_programs_take(worlds: Worlds) -> None:
    texts = worlds.run(compiled, ranks=1, devices=1)[0]
    work = WorkGraph.from_json(texts[0])
    joined, alone = (MeasuredCosts.from_json(text) for text in texts[1:3])
    clock = CHIPS["v5e"].clock_hz
    first = alone.of(work.works)[0].forward
    # A row, and the weight.
    assert first.seconds_per_row == pytest.approx(WIDTH / clock, rel=1e-3)
    assert first.seconds == pytest.approx(WIDTH * INNER / clock, rel=1e-3)
    expected = "compiled for v5e by libtpu 0{} with 4, 8 rows"
    assert str(alone) == expected.format(", works one by one")
    assert str(joined) == expected.format("")
    plan = make_plan(work, rows=16, ranks=2, device="v5e", costs=joined)
    assert plan.costs.source == str(joined)
    assert any("no work ran" in warning for warning in plan.costs.warnings)
    with pytest.raises(ValueError, match="expected costs for v5p, got some that are"):
        make_plan(work, rows=16, ranks=2, device="v5p", costs=joined)
    # The whole takes half of its arguments, and is given fewer than its works.
    faster = joined.of(work.works)[0].forward
    assert 0 < faster.seconds < first.seconds / 2
    # Works that do not compile are named.
    assert "compile_work: expected works that compile, got\n" in texts[3]
    assert "forward: no" in texts[3]
