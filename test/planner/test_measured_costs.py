"""Plans from times that were measured."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_models import gpt

from torch_xla_pp.planner import (
    MeasuredCosts,
    PipelinePlan,
    RowSeconds,
    WorkSeconds,
    make_plan,
)
from torch_xla_pp.work import WorkGraph

pytestmark = pytest.mark.pure

times = st.floats(0, 10, allow_nan=False)
lines = st.builds(RowSeconds, seconds_per_row=times, seconds=times)


def measured(work: WorkGraph, rows: tuple[int, ...] = (4, 16)) -> MeasuredCosts:
    """Return costs in which a work takes the longer, the later it comes."""
    digests = dict.fromkeys(item.digest for item in work.works)
    return MeasuredCosts(
        device="cpu",
        rows=rows,
        action_s=0.5,
        works=tuple(
            WorkSeconds(
                digest=digest,
                name=digest,
                forward=RowSeconds(seconds_per_row=number, seconds=1.0),
                backward=RowSeconds(seconds_per_row=3.0 * number, seconds=2.0),
                backward_input=RowSeconds(seconds_per_row=2.0 * number, seconds=2.0),
                backward_weight=RowSeconds(seconds_per_row=1.5 * number, seconds=1.0),
            )
            for number, digest in enumerate(digests, 1)
        ),
    )


@given(
    costs=st.builds(
        MeasuredCosts,
        device=st.just("cpu"),
        rows=st.just((2, 4)),
        action_s=times,
        works=st.lists(
            st.builds(
                WorkSeconds,
                digest=st.text("abc", min_size=1),
                name=st.just("work"),
                forward=lines,
                backward=lines,
                backward_input=lines,
                backward_weight=lines,
            ),
            unique_by=lambda work: work.digest,
            max_size=3,
        ).map(tuple),
    )
)
def test_costs_come_back_from_json(costs: MeasuredCosts) -> None:
    assert MeasuredCosts.from_json(costs.to_json()) == costs


@settings(max_examples=50)
@given(line=lines)
def test_a_line_is_found_again(line: RowSeconds) -> None:
    found = RowSeconds.fitted((2, 4, 8), [line.of(rows) for rows in (2, 4, 8)])
    assert found.of(16) == pytest.approx(line.of(16), abs=1e-9)


@pytest.mark.parametrize(
    ("seconds", "line"),
    [((4.0, 2.0), (0.0, 3.0)), ((1.0, 3.0), (0.7, 0.0)), ((2.0, 2.0), (0.0, 2.0))],
)
def test_no_line_is_negative(
    seconds: tuple[float, ...], line: tuple[float, float]
) -> None:
    found = RowSeconds.fitted((2, 4), seconds)
    assert (found.seconds_per_row, found.seconds) == pytest.approx(line)


def plan_with(schedule: str, costs: MeasuredCosts | None = None) -> PipelinePlan:
    return make_plan(
        gpt(4),
        rows=64,
        ranks=2,
        replicas=(1,),
        microbatches=(8,),
        schedules=(schedule,),
        costs=costs or measured(gpt(4)),
        remat=("none",),
        memory_bytes=2**40,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
def test_stages_take_what_their_works_took_and_the_start_of_a_program(
    schedule: str,
) -> None:
    plan, work = plan_with(schedule), gpt(4)
    costs = {x.digest: x for x in measured(work).works}
    home = {op: item for item in work.works for op in item.ops}
    assert plan.costs.source == "measured on cpu with 4, 16 rows"
    for stage, found in zip(plan.stages, plan.predicted.stages, strict=True):
        taken = [costs[home[op].digest] for op in stage.ops]
        forward = sum(x.forward.of(8) for x in taken)
        assert found.forward_s == pytest.approx(forward + 0.5)
        if schedule == "1f1b" or stage is plan.stages[0]:
            # The first stage sends no gradient: its W is the whole backward.
            whole = sum(x.backward.of(8) for x in taken)
            assert found.input_s + found.weight_s == pytest.approx(whole + 0.5)
            assert (found.input_s == 0) == (schedule == "zb1p")
        else:
            inputs = sum(x.backward_input.of(8) for x in taken)
            assert found.input_s == pytest.approx(inputs + 0.5)
            weights = sum(x.backward_weight.of(8) for x in taken)
            assert found.weight_s == pytest.approx(weights + 0.5)


def test_costs_of_another_model_are_refused() -> None:
    costs = measured(gpt(4))
    fewer = replace(costs, works=costs.works[1:])
    with pytest.raises(ValueError, match="expected times of all works, got none for"):
        plan_with("1f1b", fewer)


def test_rows_far_from_the_measured_ones_are_not_planned() -> None:
    near = make_plan(gpt(4), rows=256, ranks=2, costs=measured(gpt(4), (1, 2)))
    assert near.batch.rows_per_microbatch <= 8
    text = r"measured with 64 rows: expected microbatches of 16 to 256 rows"
    with pytest.raises(ValueError, match=text):
        plan_with("1f1b", measured(gpt(4), (64,)))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"action_s": -1.0}, "action_s: expected at least 0, got -1"),
        ({"rows": ()}, r"rows: expected counts of at least 1, got \(\)"),
        ({"works": measured(gpt(4)).works * 2}, "expected each digest once"),
    ],
)
def test_figures_without_a_sense_are_refused(
    change: dict[str, object], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        replace(measured(gpt(4)), **change)
    with pytest.raises(ValueError, match="seconds: expected a number of at least 0"):
        RowSeconds(seconds_per_row=0.0, seconds=float("nan"))
