"""Plans: sound, equal for equal input, with comparisons that can be computed again."""

import dataclasses
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_models import candle, gpt, mmt, uneven_gpt
from strategies import series_parallel_graphs, work_graphs

from torch_xla_pp.cli.options import parser
from torch_xla_pp.cli.plan_options import plan_of_options
from torch_xla_pp.planner import PipelinePlan, check, differences, make_plan
from torch_xla_pp.planner.settings import PLANNERS, PlannerName
from torch_xla_pp.simulate import simulate, step_seconds
from torch_xla_pp.work import WorkGraph

pytestmark = pytest.mark.pure


@settings(max_examples=40, deadline=None)
@given(
    graph=work_graphs() | series_parallel_graphs(),
    planner=st.sampled_from(PLANNERS),
    ranks=st.integers(1, 4),
    devices_per_rank=st.sampled_from([1, 2]),
    has_own_inputs=st.booleans(),
)
def test_every_plan_is_sound_and_comes_back_from_json(
    graph: WorkGraph,
    planner: PlannerName,
    ranks: int,
    devices_per_rank: int,
    has_own_inputs: bool,
) -> None:
    plan = make_plan(
        graph,
        rows=48,
        ranks=ranks,
        devices_per_rank=devices_per_rank,
        planner=planner,
        has_own_inputs=has_own_inputs,
    )
    check(plan, graph)
    text = plan.to_json()
    assert PipelinePlan.from_json(text) == plan
    assert PipelinePlan.from_json(text).to_json() == text


@pytest.mark.parametrize("microbatches", [16, 17])
def test_numbers_of_microbatches_that_a_schedule_refuses_are_left_out(
    microbatches: int,
) -> None:
    plan = make_plan(
        uneven_gpt(),
        rows=microbatches,
        ranks=5,
        replicas=(1,),
        microbatches=(microbatches,),
        schedules=("1f1b", "zb1p", "interleaved", "zbv"),
    )
    assert plan.schedule.name not in ("zb1p", "interleaved")
    assert {a.label for a in plan.alternatives if a.change == "schedule"} == {
        {"zbv": "1f1b", "1f1b": "zbv"}[plan.schedule.name]
    }


def test_equal_input_gives_equal_bytes() -> None:
    one, two = (
        make_plan(candle(3), rows=256, ranks=4, devices_per_rank=2, device="v5e")
        for _ in range(2)
    )
    assert one.to_json() == two.to_json()


def test_the_prediction_can_be_computed_from_the_plan_alone() -> None:
    plan = make_plan(
        mmt(2), rows=64, ranks=4, device="v5p", replicas=(1,), schedules=["zb1p"]
    )
    read = PipelinePlan.from_json(plan.to_json())
    found_s = step_seconds(read.table(), read.stage_costs(), read.network())
    assert found_s == plan.predicted.step_s
    timeline = simulate(read.table(), read.stage_costs(), read.network())
    peaks = [rank.bytes.saved + rank.bytes.passed for rank in plan.predicted.ranks]
    assert list(timeline.peak_bytes) == pytest.approx(peaks, abs=200)


def planned_by(options: str, work: str) -> PipelinePlan:
    words = ["plan", "make", work, *shlex.split(options)]
    return plan_of_options(parser().parse_args(words))


@pytest.mark.parametrize("graph", [uneven_gpt(), mmt(2)], ids=["gpt", "mmt"])
def test_each_comparison_is_what_its_options_give(
    graph: WorkGraph, tmp_path_factory: pytest.TempPathFactory
) -> None:
    work = str(tmp_path_factory.mktemp("plan") / "work.json")
    graph.to_json(work)
    asked = "--device v5e --memory 8GiB"
    plan = planned_by(
        f"--rows 64 --ranks 4 --devices-per-rank 2 --replicas 2,4 {asked}", work
    )
    assert {a.change for a in plan.alternatives} >= {"sharding", "remat"}
    for other in plan.alternatives:
        again = planned_by(f"{other.options} {asked}", work)
        assert again.predicted.step_s == other.step_s
        assert not other.fits or other.step_s >= plan.predicted.step_s
        held = max(rank.bytes.total for rank in again.predicted.ranks)
        assert held == other.peak_bytes


@pytest.mark.parametrize(
    "graph", [mmt(4), candle(3), uneven_gpt(), gpt(6, 256, 128)], ids=lambda g: g.source
)
def test_the_full_search_is_never_worse_than_the_others(graph: WorkGraph) -> None:
    plan = make_plan(
        graph, rows=64, ranks=8, device="v5p", compare=True, has_own_inputs=True
    )
    assert set(plan.baselines) == {"spp", "pipedream", "graphpipe"}
    assert all(plan.predicted.step_s <= s for s in plan.baselines.values())


def test_branches_on_ranks_of_their_own_beat_a_line() -> None:
    plan = make_plan(
        mmt(4),
        rows=64,
        ranks=8,
        device="v5p",
        replicas=(1,),
        microbatches=(16,),
        schedules=("dag",),
        compare=True,
        has_own_inputs=True,
    )
    assert plan.predicted.depth < 8
    assert plan.baselines["spp"] > 1.1 * plan.predicted.step_s
    assert plan.predicted.step_s <= plan.baselines["graphpipe"]


def test_a_plan_computes_again_where_memory_asks_for_it() -> None:
    graph = mmt(1)
    pinned = {
        "rows": 64,
        "ranks": 2,
        "device": "v5e",
        "replicas": (1,),
        "microbatches": (8,),
        "schedules": ("1f1b",),
    }
    free = make_plan(graph, **pinned)  # type: ignore[arg-type]
    most = max(rank.bytes.total for rank in free.predicted.ranks)
    assert {stage.remat for stage in free.stages} == {"none"}
    tight = make_plan(graph, **pinned, memory_bytes=int(0.7 * most), reserve=0.0)  # type: ignore[arg-type]
    assert "full" in {stage.remat for stage in tight.stages}
    assert tight.predicted.step_s > free.predicted.step_s


def test_if_nothing_fits_it_says_what_would_help() -> None:
    with pytest.raises(ValueError, match="expected a plan that fits") as caught:
        make_plan(
            gpt(24, 4096, 1024),
            rows=32,
            ranks=2,
            device="v5e",
            remat=("none",),
            sharding=("dp",),
        )
    lines = str(caught.value).split("\n")
    assert "on rank" in lines[0] and "state" in lines[0] and "saved" in lines[0]
    helps = [line.split(":")[0].strip() for line in lines[1:]]
    assert helps == [
        "allow remat full",
        "twice the ranks",
        "allow dp, fsdp and tp",
        "16 rows a step",
    ]
    assert all("fits with" in s or "still needs" in s for s in lines[1:])


def test_modules_and_inputs_of_stages_are_named() -> None:
    plan = make_plan(
        uneven_gpt(),
        rows=8,
        ranks=2,
        replicas=(1,),
        schedules=("1f1b",),
        microbatches=(4,),
        memory_bytes=2**36,
    )
    first, last = plan.stages
    assert first.modules[0] == "embed" and last.modules[-1] == "head"
    assert first.inputs == ("tokens",)
    assert len(last.inputs) == 1 and last.inputs[0].endswith("_out")
    assert [op for s in plan.stages for op in s.ops] == [
        op for work in uneven_gpt().works for op in work.ops
    ]
    text = str(plan)
    assert "embed, layers.0..6" in text or "embed, layers.0..5" in text
    for part in ("rows/s", "rank", "state", "why    split", "other"):
        assert part in text


def test_two_plans_are_compared() -> None:
    plan = make_plan(uneven_gpt(), rows=8, ranks=2, memory_bytes=2**36)
    assert differences(plan, plan) == "no difference"
    other = make_plan(uneven_gpt(), rows=8, ranks=2, memory_bytes=2**36, replicas=(2,))
    changed = dataclasses.replace(
        plan, schedule=dataclasses.replace(plan.schedule, name="zb1p")
    )
    assert "zb1p" in differences(plan, changed)
    assert "replicas" in differences(changed, other) or plan.batch.replicas == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ranks": 2, "device": "v9"}, "device: expected one of cpu, v5e"),
        ({"ranks": 2, "schedules": ("2f2b",)}, "schedules: expected some of 1f1b, "),
        ({"ranks": 2, "sharding": ("xp",)}, "sharding: expected some of dp, fsdp, tp"),
        ({"ranks": 2, "remat": ("half",)}, "remat: expected some of none, full"),
        ({"ranks": 2, "optimizer": "lion"}, "optimizer: expected one of sgd, momentum"),
        ({"ranks": 2, "optimizer": -1.0}, "optimizer: expected one of sgd, momentum"),
        ({}, "expected ranks .* or devices, got neither"),
        ({"ranks": 0}, "ranks: expected counts of at least 1, got 0"),
        ({"ranks": 23, "replicas": (1,)}, "at most 22 ranks .* got 23"),
        ({"ranks": 3, "devices": 4}, "make 4 devices, got ranks 3"),
        ({"ranks": 2, "replicas": (1,), "microbatches": (3,)}, "divide the rows of a"),
        ({"ranks": 3, "replicas": (3,)}, "8 rows that replicas 3"),
        ({"ranks": 2, "memory_bytes": 0}, "memory above 0 bytes, got 0"),
        ({"ranks": 2, "reserve": 1.5}, "reserve of at least 0 and below 1, got 1.5"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_plan(uneven_gpt(), rows=8, **arguments)  # type: ignore[arg-type]


def test_stages_without_gradients_of_inputs_keep_all_that_is_saved_for_w() -> None:
    plan = make_plan(gpt(4), rows=64, ranks=2, replicas=(1,), schedules=["zb1p"])
    first, last = plan.predicted.stages
    assert first.passed_bytes == first.saved_bytes
    assert 0 < last.passed_bytes != last.saved_bytes
