"""What is wrong with a plan is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from planner_models import candle, gpt, uneven_gpt

from torch_xla_pp.planner import PipelinePlan, check, make_plan

pytestmark = pytest.mark.pure

GRAPH = uneven_gpt()
PLAN = make_plan(
    GRAPH,
    rows=16,
    ranks=3,
    devices_per_rank=2,
    device="v5e",
    replicas=(1,),
    microbatches=(4,),
    schedules=("zb1p",),
    meshes=((2, 1),),
)


def moved(plan: PipelinePlan, op: int, sender: int, receiver: int) -> PipelinePlan:
    stages = [list(stage.ops) for stage in plan.stages]
    stages[receiver].append(stages[sender].pop(op))
    return with_ops(plan, stages)


def with_ops(plan: PipelinePlan, ops: list[list[str]]) -> PipelinePlan:
    stages = [
        replace(stage, ops=tuple(own))
        for stage, own in zip(plan.stages, ops, strict=True)
    ]
    return replace(plan, stages=tuple(stages))


def with_rank(plan: PipelinePlan, **changes: Any) -> PipelinePlan:
    ranks = (replace(plan.ranks[0], **changes), *plan.ranks[1:])
    return replace(plan, ranks=ranks)


def with_bytes(plan: PipelinePlan, **changes: int) -> PipelinePlan:
    first, *others = plan.predicted.ranks
    stated = replace(first, bytes=replace(first.bytes, **changes))
    predicted = replace(plan.predicted, ranks=(stated, *others))
    return replace(plan, predicted=predicted)


def ops_of(plan: PipelinePlan) -> list[list[str]]:
    return [list(stage.ops) for stage in plan.stages]


MUTANTS: dict[str, tuple[Callable[[PipelinePlan], PipelinePlan], str]] = {
    "another model": (
        lambda p: replace(p, model=replace(p.model, digest="0")),
        "model: expected digest 0, got",
    ),
    "an operation left out": (
        lambda p: with_ops(p, [ops_of(p)[0][1:], *ops_of(p)[1:]]),
        "operation embed_op: expected in a stage, got it in none",
    ),
    "an operation twice": (
        lambda p: with_ops(
            p, [ops_of(p)[0], ["embed_op", *ops_of(p)[1]], ops_of(p)[2]]
        ),
        "operation embed_op: expected in one stage, got it in 2",
    ),
    "an unknown operation": (
        lambda p: with_ops(p, [[*ops_of(p)[0], "ghost"], *ops_of(p)[1:]]),
        "operation ghost: expected one of the model",
    ),
    "values that go down": (
        lambda p: moved(p, 0, 0, 2),
        "expected values to go to higher stages, got them from 2 to 0",
    ),
    "a stage in the middle of another": (
        lambda p: moved(p, 1, 0, 1),
        "expected values to go to higher stages, got them from 1 to 0",
    ),
    "a rank without a stage": (
        lambda p: replace(p, stages=(replace(p.stages[0], rank=1), *p.stages[1:])),
        "ranks: expected a stage on each of ranks 0..2, got stages on 1, 2",
    ),
    "stages on exchanged ranks": (
        lambda p: replace(
            p,
            stages=(
                replace(p.stages[0], rank=1),
                replace(p.stages[1], rank=0),
                p.stages[2],
            ),
        ),
        "(?s)schedule zb1p: .*expected stage 0 on rank 1, got it on rank 0",
    ),
    "rows that do not add up": (
        lambda p: replace(p, batch=replace(p.batch, rows=17)),
        "rows: expected 17 to be 1 replicas x 4 microbatches x 4 rows, got 16",
    ),
    "rows that devices do not divide": (
        lambda p: replace(p, batch=replace(p.batch, rows=12, rows_per_microbatch=3)),
        "rank 0: expected rows of a microbatch that 2 devices divide, got 3",
    ),
    "a mesh of other devices": (
        lambda p: with_rank(p, devices=4),
        "rank 0: expected a mesh of its 4 devices, got {'data': 2}",
    ),
    "an unknown way to compute again": (
        lambda p: replace(
            p, stages=(replace(p.stages[0], remat="half"), *p.stages[1:])
        ),
        "stage 0: expected remat none or full, got 'half'",
    ),
    "too little memory": (
        lambda p: with_rank(p, capacity_bytes=10**6),
        "rank 0: expected at most 1000000 bytes on a device, got",
    ),
    "less stated than held": (
        lambda p: with_bytes(p, saved=0),
        "rank 0: expected the stated .* bytes, got",
    ),
    "computing again without saying so": (
        lambda p: replace(
            p, stages=(replace(p.stages[0], remat="full"), *p.stages[1:])
        ),
        "rank 0: expected the stated .* bytes, got",
    ),
    "another schedule": (
        lambda p: replace(p, schedule=replace(p.schedule, name="gpipe")),
        "rank 0: expected the stated .* bytes, got",
    ),
    "a listed order that is not there": (
        lambda p: replace(p, schedule=replace(p.schedule, name="list")),
        "schedule: expected a table of actions for list alone, got none for list",
    ),
    "an unknown schedule": (
        lambda p: replace(p, schedule=replace(p.schedule, name="2f2b")),
        "schedule: expected one of 1f1b, .*, got '2f2b'",
    ),
    "no edge where a value goes": (
        lambda p: replace(p, predicted=replace(p.predicted, flows=())),
        "edges: expected 0->1, as a value goes there, got none",
    ),
    "a prediction for other stages": (
        lambda p: replace(
            p, predicted=replace(p.predicted, stages=p.predicted.stages[:2])
        ),
        "stages: expected a prediction for each of 3, got 2",
    ),
}


def test_a_sound_plan_passes() -> None:
    check(PLAN, GRAPH)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_refused_by_name(name: str) -> None:
    mutate, text = MUTANTS[name]
    with pytest.raises(ValueError, match=text):
        check(mutate(PLAN), GRAPH)


def test_a_work_is_not_cut_apart() -> None:
    graph = candle(1)
    double = replace(
        graph,
        works=(
            replace(graph.works[0], ops=("one", "two")),
            *graph.works[1:],
        ),
    )
    plan = make_plan(double, rows=8, ranks=2, device="v5e", replicas=(1,))
    ops = ops_of(plan)
    ops[1].append(ops[0].pop(1))
    with pytest.raises(ValueError, match="got it cut into stages 0, 1"):
        check(with_ops(plan, ops), double)


def test_several_faults_are_told_at_once() -> None:
    broken = replace(with_rank(PLAN, devices=4), batch=replace(PLAN.batch, rows=17))
    with pytest.raises(ValueError, match="plan: ") as caught:
        check(broken, GRAPH)
    assert len(str(caught.value).split("\n")) == 2


def test_another_model_is_named_by_its_first_operation() -> None:
    with pytest.raises(ValueError, match="lacks the planned operation layers.0.attent"):
        other = gpt(1, 64, 16)
        check(
            PLAN,
            replace(
                other, works=(*other.works[:1], *other.works[3:]), values=(), outputs=()
            ),
        )


def test_faults_of_a_file_are_told_at_once() -> None:
    data = json.loads(PLAN.to_json())
    data["color"] = "red"
    del data["batch"]["rows"]
    data["stages"][1]["rank"] = "one"
    with pytest.raises(ValueError, match="torch_xla_pp plan 1") as caught:
        PipelinePlan.from_json(json.dumps(data) + "\n")
    text = str(caught.value)
    for part in ("color: expected no such field", "batch.rows: expected this field"):
        assert part in text
    assert "stages[1].rank: expected a whole number, got 'one'" in text


def test_a_file_that_no_model_could_run_is_refused_with_all_its_faults() -> None:
    data = json.loads(PLAN.to_json())
    data["stages"][2]["ops"].append(data["stages"][0]["ops"][0])
    data["stages"][1]["ops"].pop()
    data["stages"][1]["rank"] = 7
    data["predicted"]["flows"][0] |= {"producer": 2, "consumers": [1]}
    data["batch"]["rows"] = 17
    data["schedule"]["name"] = "2f2b"
    with pytest.raises(ValueError, match="torch_xla_pp plan 1") as caught:
        PipelinePlan.from_json(json.dumps(data) + "\n")
    lines = str(caught.value).split("\n")
    assert len(lines) == 6
    for part in (
        "rows: expected 17 to be 1 replicas x 4 microbatches x 4 rows, got 16",
        "ranks: expected a stage on each of ranks 0..2, got stages on 0, 2, 7",
        "schedule: expected one of 1f1b",
        "operation embed_op: expected in one stage, got it in 2",
        "operations: expected the 22 of the model in stages, got 21",
        "stages: expected values to go to higher stages, got them from 2 to 1",
    ):
        assert any(part in line for line in lines), part


def test_an_older_format_is_refused() -> None:
    text = PLAN.to_json().replace("plan 1", "plan 0")
    with pytest.raises(ValueError, match="got 'torch_xla_pp plan 0'"):
        PipelinePlan.from_json(text)
