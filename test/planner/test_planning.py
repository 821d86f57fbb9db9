"""Plans: sound, equal for equal input, with comparisons that can be computed again."""

import dataclasses
import re
import shlex
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_models import candle, gpt, mmt, uneven_gpt
from strategies import series_parallel_graphs, work_graphs

from torch_xla_pp.cli.options import parser
from torch_xla_pp.cli.plan_options import plan_of_options
from torch_xla_pp.planner import (
    DEVICES,
    Cluster,
    PipelinePlan,
    RankBytes,
    check,
    differences,
    link_between_ranks,
    make_plan,
)
from torch_xla_pp.planner.evaluation import Evaluator, Setting
from torch_xla_pp.planner.search import balanced_seconds
from torch_xla_pp.planner.settings import PLANNERS, PlannerName
from torch_xla_pp.planner.strategies import strategies_for
from torch_xla_pp.planner.work_costs import WorkTable
from torch_xla_pp.simulate import simulate, step_seconds
from torch_xla_pp.text import bytes_text, seconds_text
from torch_xla_pp.work import Amount, Cost, Work, WorkGraph, WorkValue

pytestmark = pytest.mark.pure

SIZES = ("data", "model")
PARTS = [field.name for field in dataclasses.fields(RankBytes)]


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


@pytest.mark.parametrize("schedule", ["dag", "zb1p"])
def test_the_prediction_can_be_computed_from_the_plan_alone(schedule: str) -> None:
    plan = make_plan(
        mmt(2), rows=64, ranks=4, device="v5p", replicas=(1,), schedules=[schedule]
    )
    read = PipelinePlan.from_json(plan.to_json())
    found_s = step_seconds(read.table(), read.stage_costs(), read.network())
    assert found_s == plan.predicted.step_s
    timeline = simulate(read.table(), read.stage_costs(), read.network())
    peaks = [rank.bytes.saved + rank.bytes.passed for rank in plan.predicted.ranks]
    for held, peak in zip(timeline.peak_bytes, peaks, strict=True):
        # A timeline has what is held between actions alone.
        assert held <= peak + 200
        assert schedule == "zb1p" or held == pytest.approx(peak, abs=200)


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


def test_every_number_of_a_reason_is_that_of_the_plan_or_of_an_alternative() -> None:
    graph, device = uneven_gpt(), DEVICES["v5e"]
    plan = make_plan(
        graph, rows=64, ranks=4, devices_per_rank=2, replicas=(2, 4), device=device
    )
    split, *others = plan.reasons
    network = link_between_ranks(device)
    cluster = Cluster(device=device, num_devices=8, network=network)
    setting = Setting(
        num_ranks=len(plan.ranks),
        replicas=plan.batch.replicas,
        strategy=next(
            s
            for s in strategies_for(2)
            if s.presets == plan.ranks[0].rules
            and (s.data, s.model) == tuple(map(plan.ranks[0].mesh.get, SIZES, (1, 1)))
        ),
        rows=plan.batch.rows_per_microbatch,
        num_microbatches=plan.batch.microbatches,
        schedule=plan.schedule.name,
        stages_per_rank=plan.schedule.stages_per_rank,
    )
    evaluator = Evaluator(table=WorkTable(graph), cluster=cluster)
    balanced = seconds_text(balanced_seconds(evaluator, setting))
    mine_s = plan.predicted.step_s
    assert split == (
        f"split: {len(plan.stages)} stages take {seconds_text(mine_s)}; perfectly "
        f"balanced ones are estimated at {balanced}"
    )
    held = max(rank.bytes.total for rank in plan.predicted.ranks)
    for reason, other in zip(others, plan.alternatives, strict=True):
        assert reason.startswith(f"{other.change}: ")
        assert reason.endswith(
            f" and not {other.label}: {seconds_text(other.step_s)} a step, "
            f"{100 * (other.step_s / mine_s - 1):+.1f} %, with "
            f"{bytes_text(other.peak_bytes)} of a device in place of {bytes_text(held)}"
        )
    assert len(others) >= 4


def test_a_reason_says_how_much_an_alternative_lacks() -> None:
    asked: dict[str, Any] = {"rows": 64, "ranks": 2, "device": "v5e", "replicas": (1,)}
    free = make_plan(mmt(1), schedules=("gpipe",), microbatches=(8,), **asked)
    held = max(rank.bytes.total for rank in free.predicted.ranks)
    plan = make_plan(
        mmt(1),
        schedules=("1f1b", "gpipe"),
        microbatches=(8,),
        remat=("none",),
        memory_bytes=held - 1,
        reserve=0.0,
        **asked,
    )
    (other,) = [a for a in plan.alternatives if a.change == "schedule"]
    assert not other.fits
    lack = bytes_text(other.peak_bytes - plan.ranks[0].capacity_bytes)
    assert f"gpipe: a device would need {lack} more than it has" in str(plan)


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
    assert lines[1].split() == ["rank", *PARTS, "total", "of"]
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
    effects = dict(line.strip().split(": ") for line in lines[5:])
    assert [*effects] == [
        "allow remat full",
        "twice the ranks",
        "allow dp, fsdp and tp",
        "2 devices per rank, with dp, fsdp and tp",
        "4 rows a step",
    ]
    assert effects["twice the ranks"].startswith("fits with ")
    assert effects["allow dp, fsdp and tp"].startswith("still needs ")


def test_of_many_devices_only_twice_as_many_and_half_the_rows_are_tried() -> None:
    with pytest.raises(ValueError, match="expected a plan that fits") as caught:
        make_plan(
            gpt(2, 4096, 1024),
            rows=256,
            devices=256,
            device="v5e",
            memory_bytes=2**25,
            sharding=("dp",),
            microbatches=(1,),
            replicas=(64, 128, 256),
            schedules=("1f1b",),
        )
    effects = [line.strip().split(": ")[0] for line in str(caught.value).split("\n")]
    assert "twice the devices" in effects and "128 rows a step" in effects
    assert not {"4 times the devices", "64 rows a step"} & {*effects}


def test_what_would_help_is_a_plan_that_can_be_made() -> None:
    asked = {"rows": 32, "device": "v5e", "sharding": ("dp",)}
    graph = gpt(24, 4096, 1024)
    with pytest.raises(ValueError, match="expected a plan that fits") as caught:
        make_plan(graph, ranks=2, remat=("none",), **asked)  # type: ignore[arg-type]
    for label, changes in {
        "allow remat full": {"remat": ("none", "full"), "ranks": 2},
        "twice the ranks": {"remat": ("none",), "ranks": 4},
    }.items():
        effect = str(caught.value).split(f"{label}: ")[1].split("\n")[0]
        if effect.startswith("fits"):
            plan = make_plan(graph, **asked, **changes)  # type: ignore[arg-type]
            held = max(rank.bytes.total for rank in plan.predicted.ranks)
            time = seconds_text(plan.predicted.step_s)
            assert effect == f"fits with {bytes_text(held)}, {time} a step"
        else:
            with pytest.raises(ValueError, match="at least") as again:
                make_plan(graph, **asked, **changes)  # type: ignore[arg-type]
            needed = str(again.value).split("at least ")[1].split(" on")[0]
            assert effect == f"still needs {needed}"


def test_a_plan_says_what_each_rank_holds_part_by_part() -> None:
    plan = make_plan(gpt(4), rows=64, ranks=2, replicas=(1,), schedules=["zb1p"])
    lines = str(plan).split("memory of a device\n")[1].split("\n\n")[0].split("\n")
    assert lines[0].split() == ["rank", *PARTS, "total", "of"]
    for number, (line, rank) in enumerate(
        zip(lines[1:], plan.predicted.ranks, strict=True)
    ):
        parts = [getattr(rank.bytes, part) for part in PARTS]
        sizes = [*parts, sum(parts), plan.ranks[number].capacity_bytes]
        assert line.split("  ")[0].strip() == str(number)
        assert [x.strip() for x in line.split("  ") if x.strip()][1:] == [
            bytes_text(size) for size in sizes
        ]


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
    for part in ("rows/s", "rank", "optimizer", "why    split", "other"):
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
    device = make_plan(uneven_gpt(), rows=16, ranks=2, device="v5e", optimizer="sgd")
    lines = dict(
        line.split(maxsplit=1) for line in differences(plan, device).split("\n")
    )
    assert lines["rows"].split() == ["8", "16"]
    assert lines["device"].split() == ["cpu", "v5e"]
    assert lines["optimizer"].startswith("2 bytes a byte of parameters")


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
        ({"ranks": 3, "replicas": (3,)}, "8 rows that replicas 3.*; take 9 rows"),
        ({"ranks": 2, "memory_bytes": 0}, "memory above 0 bytes, got 0"),
        ({"ranks": 2, "reserve": 1.5}, "reserve of at least 0 and below 1, got 1.5"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_plan(uneven_gpt(), rows=8, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "arguments", "text"),
    [
        (8, {"ranks": 2, "microbatches": (3,)}, "1, 2, 4, 8; or take 9 rows"),
        (
            170,
            {"ranks": 5, "microbatches": (17,), "schedules": ("zb1p",)},
            "that a schedule of zb1p takes, got 17. The nearest .* 1, 2, 5, 10;",
        ),
        (
            16,
            {"ranks": 4, "microbatches": (4,), "schedules": ("zbv",)},
            "that a schedule of zbv takes, got 4. The nearest that work are 8, 16",
        ),
        (
            10,
            {"ranks": 2, "devices_per_rank": 4, "sharding": ("dp",)},
            "expected 10 rows .* \\(up to 4\\) divide.* take 8 rows",
        ),
    ],
)
def test_the_nearest_numbers_that_work_are_told_and_do(
    rows: int, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        make_plan(uneven_gpt(), rows=rows, replicas=(1,), **arguments)
    listed = re.search(r"are ([\d, ]+);", str(caught.value))
    for count in (
        listed[1].split(", ") if listed and "microbatches" in arguments else ()
    ):
        again = arguments | {"microbatches": (int(count),), "memory_bytes": 2**40}
        assert make_plan(uneven_gpt(), rows=rows, replicas=(1,), **again)
    if near := re.search(r"take (\d+) rows", str(caught.value)):
        again = arguments | {"memory_bytes": 2**40}
        assert make_plan(uneven_gpt(), rows=int(near[1]), replicas=(1,), **again)


def test_stages_without_gradients_of_inputs_keep_all_that_is_saved_for_w() -> None:
    graph = gpt(4)
    plan = make_plan(graph, rows=64, ranks=2, replicas=(1,), schedules=["zb1p"])
    first, last = plan.predicted.stages
    assert first.passed_bytes == first.saved_bytes
    assert 0 < last.passed_bytes != last.saved_bytes


def test_what_an_i_makes_is_there_with_what_it_reads() -> None:
    def amounts(count: int) -> dict[str, Amount]:
        return dict.fromkeys(("none", "full"), Amount(bytes=count))

    def work(name: str, passed: int, made: int) -> Work:
        return Work(
            name=name,
            ops=(f"{name}_op",),
            module=name,
            digest=name,
            forward=Cost(flops=1),
            backward_input=Cost(flops=1),
            backward_weight=Cost(flops=1),
            saved=amounts(100),
            passed=amounts(passed),
            made=amounts(made),
        )

    def value(name: str, producer: str | None, *users: str) -> WorkValue:
        return WorkValue(
            name=name,
            bytes_per_row=0,
            bytes=0,
            has_gradient=producer is not None,
            producer=producer,
            users=users,
        )

    graph = WorkGraph(
        works=(work("first", 0, 0), work("last", 60, 40)),
        values=(
            value("x", None, "first"),
            value("y", "first", "last"),
            value("z", "last"),
        ),
        rows=1,
        outputs=("z",),
    )
    plan = make_plan(
        graph,
        rows=2,
        ranks=2,
        replicas=(1,),
        microbatches=(2,),
        schedules=["zb1p"],
        remat=("none",),
        stages=[["first_op"], ["last_op"]],
    )
    first, last = (rank.bytes for rank in plan.predicted.ranks)
    # The first stage has no I.
    assert (first.saved, first.passed) == (200, 0)
    # The I of the second microbatch reads 100 and makes 40, the first one left 60.
    assert [action.kind for action in plan.table().actions[1][:4]] == [*"FIFI"]
    assert (last.saved, last.passed) == (100, 100)
    check(plan, graph)


def test_gradients_from_stages_of_the_same_rank_wait_for_w() -> None:
    graph = mmt(2)
    # Stages 1 and 2 are the second branch, on one rank.
    parts = [graph.works[a:b] for a, b in ((0, 16), (16, 24), (24, 32), (32, None))]
    plan = make_plan(
        graph,
        rows=64,
        ranks=2,
        replicas=(1,),
        schedules=["zbv"],
        stages=[[op for work in part for op in work.ops] for part in parts],
    )
    home = {op: n for n, stage in enumerate(plan.stages) for op in stage.ops}
    homes = {work.name: home[work.ops[0]] for work in graph.works}
    ranks = [stage.rank for stage in plan.stages]
    rows, found = plan.batch.rows_per_microbatch, 0.0
    for number, predicted in enumerate(plan.predicted.stages):
        used = [v for v in graph.values if number in {homes[name] for name in v.users}]
        if any(v.has_gradient and homes[v.producer or ""] != number for v in used):
            continue
        waiting = 0.0
        for value in graph.values:
            if homes.get(value.producer or "") == number and value.has_gradient:
                users = {homes[name] for name in value.users} - {number}
                near = [user for user in users if ranks[user] == ranks[number]]
                waiting += len(near) * value.size.of(rows)
        assert predicted.passed_bytes == predicted.saved_bytes + waiting
        found += waiting
    assert found > 0
