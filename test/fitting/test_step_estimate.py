"""A step's time is that of its programs in the order of the schedule."""

from dataclasses import replace

import pytest

from torch_xla_pp.accelerators import (
    CHIPS,
    CompiledProgram,
    ProgramBytes,
    ProgramTime,
    Slice,
)
from torch_xla_pp.fitting import Fit, ProgramFit, StageFit, StepEstimate, ValueBytes
from torch_xla_pp.schedule import Schedule, gpipe, one_f_one_b
from torch_xla_pp.simulate import Costs, Flow, Link, simulate

pytestmark = pytest.mark.pure

DEVICES = Slice.parse("v5e:2x2")
FAST = Link(bytes_per_s=1e12)


def program(name: str, seconds: float) -> ProgramFit:
    num_bytes = ProgramBytes(arguments=0, outputs=0, aliased=0, temporaries=0, code=0)
    time = ProgramTime(
        compute_s=seconds, exchange_s=0.0, hidden_s=0.0, roofline_s=seconds
    )
    compiled = CompiledProgram(num_bytes=num_bytes)
    return ProgramFit(name=name, compiled=compiled, time=time)


def stage(index: int, *programs: ProgramFit, num_bytes: int = 0) -> StageFit:
    flow = Flow(producer=index, consumers=(index + 1,), num_bytes=num_bytes)
    return StageFit(
        index=index,
        parameter_bytes=100,
        buffer_bytes=0,
        gradient_bytes=100,
        optimizer_bytes=200,
        saved_bytes=10,
        passed_bytes=0,
        programs=programs,
        flows=(flow,) if num_bytes else (),
    )


def both(num_bytes: int) -> list[StageFit]:
    last = (program("forward", 1.0), program("loss", 0.5), program("backward", 3.0))
    sums = program("gradient reduction", 0.25)
    first = (program("forward", 1.0), program("backward", 2.0), sums)
    return [stage(0, *first, num_bytes=num_bytes), stage(1, *last)]


def estimate(schedule: Schedule, stages: list[StageFit], **more: object) -> float:
    return StepEstimate.of(schedule, stages, DEVICES, **more).step_s  # type: ignore[arg-type]


def test_actions_take_what_their_programs_take() -> None:
    found = StepEstimate.of(gpipe(2, 1), both(1), DEVICES, link=FAST)
    assert found.seconds["1F"] == 1.5 and found.seconds["1B"] == 3.0
    updated = 2 * (100 + 200) + 100
    final_s = 0.25 + updated / CHIPS["v5e"].memory_bytes_per_s
    assert found.final_s == pytest.approx(final_s)
    assert found.step_s == pytest.approx(1 + 1.5 + 3 + 2 + final_s)
    assert found.bubble_share == pytest.approx(0.5)


def test_messages_go_through_the_network_unless_a_link_is_given() -> None:
    size = int(4 * CHIPS["v5e"].network_bytes_per_s)
    order = gpipe(2, 1)
    # One second for values, one for their gradients.
    more = estimate(order, both(size)) - estimate(order, both(size), link=FAST)
    assert more == pytest.approx(2.0, rel=0.02)


def test_a_recorded_step_scales_the_times() -> None:
    schedule = one_f_one_b(2, 4)
    seconds = {(0, "F"): 2.0, (0, "B"): 4.0, (1, "F"): 3.0, (1, "B"): 6.0}
    ran = simulate(schedule, Costs(seconds=seconds, flows=both(1)[0].flows))  # type: ignore[arg-type]
    found = StepEstimate.of(schedule, both(1), DEVICES, link=FAST, recorded=ran)
    assert found.factors["F"] == found.factors["B"] == pytest.approx(2.0)
    assert found.step_s - found.final_s == pytest.approx(ran.step_s)
    assert "scaled to a recorded step: F x2.00, B x2.00" in str(found)


def fit_of(stages: list[StageFit]) -> Fit:
    return Fit.of(
        gpipe(2, 1),
        stages,
        topology="v5e:2x2",
        compiler="1",
        mesh={"data": 4},
        limit_bytes=1000,
    )


def test_a_step_is_told_and_written_unless_a_program_does_not_compile() -> None:
    found = fit_of(both(1))
    assert found.step is not None and str(found.step) in str(found)
    assert "bubble 50.0%" in str(found)
    assert Fit.from_json(found.to_json()) == found
    broken = ProgramFit(name="backward", compiled=CompiledProgram(error="no"))
    assert fit_of([both(1)[0], stage(1, broken)]).step is None


def test_the_line_of_a_program_states_what_has_no_cycles() -> None:
    one = program("forward", 0.001)
    compiled = replace(one.compiled, cycles=1500, num_timed=7, num_untimed=2)
    time = ProgramTime(
        compute_s=0.001, exchange_s=0.002, hidden_s=0.0, roofline_s=0.004
    )
    lines = [*replace(one, compiled=compiled, time=time).lines()]
    assert lines[1] == (
        "  3 ms: computes 1 ms, 2 ms of collectives waited for; roofline 4 ms (1,500 "
        "cycles of 7 instructions, 2 without cycles)"
    )


def test_padding_of_arguments_is_held_while_a_program_runs() -> None:
    values = ValueBytes(arguments=10, argument_padding=6, outputs=8, output_padding=504)
    num_bytes = ProgramBytes(
        arguments=16, outputs=512, aliased=512, temporaries=0, code=0
    )
    compiled = CompiledProgram(num_bytes=num_bytes)
    one = replace(program("forward", 1.0), compiled=compiled, values=values)
    assert one.held_bytes == 6
    assert values.agrees(compiled)
    assert not replace(values, outputs=9).agrees(compiled)
