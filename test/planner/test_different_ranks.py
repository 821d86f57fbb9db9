"""Plans for ranks that differ in devices: as good as any cut, sound, or one error."""

import dataclasses
import random
import shlex
from collections.abc import Iterator, Sequence
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_models import gpt, mmt, uneven_gpt
from strategies import work_graphs

from torch_xla_pp.cli.options import parser
from torch_xla_pp.cli.plan_options import plan_of_options
from torch_xla_pp.mesh import AxisRules
from torch_xla_pp.planner import DEVICES, DeviceSpec, PipelinePlan, check, make_plan
from torch_xla_pp.planner.checks import faults_in
from torch_xla_pp.planner.orders import branches_1f1b
from torch_xla_pp.planner.strategies import Strategy, strategies_for
from torch_xla_pp.schedule import Schedule, one_f_one_b
from torch_xla_pp.simulate import (
    Costs,
    Flow,
    Link,
    Network,
    stage_seconds,
    step_seconds,
)
from torch_xla_pp.work import Amount, Cost, Work, WorkGraph, WorkParameter, WorkValue

pytestmark = pytest.mark.pure

# Nothing but FLOPs takes time, so that a test can count it in one line.
PLAIN = DeviceSpec(
    name="plain",
    flops_per_s=1e9,
    efficiency=1.0,
    bytes_per_s=1e30,
    memory_bytes=2**40,
    action_s=0.0,
    link_bytes_per_s=1e30,
    link_latency_s=0.0,
)
MICROBATCHES, ROWS = 6, 4


def device(name: str, speed: float, memory_bytes: int = 2**40) -> DeviceSpec:
    return dataclasses.replace(
        PLAIN, name=name, flops_per_s=speed, memory_bytes=memory_bytes
    )


KINDS = (device("slow", 1e9), device("quick", 2e9), device("fast", 3e9))


def graph_of(flops: Sequence[float], users: Sequence[Sequence[int]]) -> WorkGraph:
    """Works that take so many FLOPs a row in F, I and W, and the users of each."""
    names = [f"w{place}" for place in range(len(flops))]
    nothing = {"none": Amount(), "full": Amount()}
    works = tuple(
        Work(
            name=name,
            ops=(f"{name}_op",),
            module=name,
            digest=name,
            forward=Cost(flops_per_row=count),
            backward_input=Cost(flops_per_row=count),
            backward_weight=Cost(flops_per_row=count),
            saved=nothing,
            passed=nothing,
            parameters=(
                WorkParameter(name=name, shape=(250,), dtype="float32", bytes=1000),
            ),
        )
        for name, count in zip(names, flops, strict=True)
    )
    values = tuple(
        WorkValue(
            name=f"v{place}",
            bytes_per_row=8.0,
            bytes=0,
            has_gradient=True,
            producer=name,
            users=tuple(names[user] for user in users[place]),
        )
        for place, name in enumerate(names)
    )
    return WorkGraph(works=works, values=values, rows=ROWS, outputs=(values[-1].name,))


def chain(flops: Sequence[float]) -> WorkGraph:
    count = len(flops)
    return graph_of(flops, [[n + 1] if n + 1 < count else [] for n in range(count)])


def random_works(draw: random.Random, count: int) -> WorkGraph:
    """A DAG in which each work uses one or two of those before it, if any."""
    users: list[list[int]] = [[] for _ in range(count)]
    for place in range(1, count):
        for producer in draw.sample(range(place), min(place, draw.choice([1, 1, 2]))):
            users[producer].append(place)
    return graph_of([draw.uniform(1, 10) * 1e6 for _ in range(count)], users)


def partitions(count: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """All ways to put works into so many stages, numbered in any way."""
    for found in product(range(num_stages), repeat=count):
        if len({*found}) == num_stages:
            yield found


def rates(kinds: Sequence[DeviceSpec], counts: Sequence[int]) -> list[float]:
    """FLOPs per second of each rank, whose devices split rows."""
    pairs = zip(kinds, counts, strict=True)
    return [kind.flops_per_s * count for kind, count in pairs]


def best_step_s(
    graph: WorkGraph, speeds: Sequence[float], most_works: Sequence[int], order: str
) -> float | None:
    """Try all cuts on all ranks: those that go forward and suit what ranks hold."""
    count, best = len(speeds), None
    edges = graph.edges
    for ranks in partitions(len(graph.works), count):
        if any(ranks.count(rank) > most for rank, most in enumerate(most_works)):
            continue
        for sequence in permutations(range(count)):
            stage_of = {rank: stage for stage, rank in enumerate(sequence)}
            stages = [stage_of[rank] for rank in ranks]
            if any(stages[p] > stages[c] for p, c in edges):
                continue
            step_s = step_of(graph, stages, sequence, speeds, order)
            best = step_s if best is None else min(best, step_s)
    return best


def step_of(
    graph: WorkGraph,
    stages: Sequence[int],
    sequence: Sequence[int],
    speeds: Sequence[float],
    order: str,
) -> float:
    seconds = [0.0] * len(sequence)
    for work, stage in zip(graph.works, stages, strict=True):
        seconds[stage] += ROWS * work.forward.flops_per_row / speeds[sequence[stage]]
    pairs = {(stages[p], stages[c]) for p, c in graph.edges if stages[p] != stages[c]}
    flows = tuple(Flow(producer=p, consumers=(c,)) for p, c in sorted(pairs))
    count = len(sequence)
    made = one_f_one_b(count, MICROBATCHES)
    if order == "dag":
        made = branches_1f1b(count, MICROBATCHES, tuple(sorted(pairs)))
    rows = dict(zip(sequence, made.actions, strict=True))
    schedule = Schedule(actions=tuple(rows[rank] for rank in range(count)))
    costs = Costs(seconds=stage_seconds((s, s, s) for s in seconds), flows=flows)
    return step_seconds(schedule, costs, Network())


def planned(graph: WorkGraph, **options: Any) -> PipelinePlan:
    asked: dict[str, Any] = {
        "rows": MICROBATCHES * ROWS,
        "microbatches": (MICROBATCHES,),
        "replicas": (1,),
        "sharding": ("dp",),
        "remat": ("none",),
        "reserve": 0.0,
        "network": Network(),
        "has_own_inputs": True,
    }
    plan = make_plan(graph, **asked | options)
    check(plan, graph)
    return plan


@pytest.mark.parametrize("order", ["1f1b", "dag"])
@pytest.mark.parametrize("is_bound", [False, True], ids=["free", "bound"])
def test_plans_are_as_good_as_the_best_of_all_cuts(order: str, is_bound: bool) -> None:
    gaps = []
    for seed in range(16):
        draw = random.Random(seed)
        num_ranks, num_works = draw.choice([2, 3]), draw.choice([5, 6])
        flops = [draw.uniform(1, 10) * 1e6 for _ in range(num_works)]
        graph = chain(flops) if order == "1f1b" else random_works(draw, num_works)
        counts = [draw.choice([1, 2]) for _ in range(num_ranks)]
        kinds = [draw.choice(KINDS) for _ in range(num_ranks)]
        most = [num_works] * num_ranks
        if is_bound:
            # Parameters, gradients and two of the optimizer's for each work; and what
            # is live for a moment.
            most[draw.randrange(num_ranks)] = 2
            kinds = [
                device(f"{kind.name} {own}", kind.flops_per_s, 4000 * own + 2000)
                for kind, own in zip(kinds, most, strict=True)
            ]
        plan = planned(
            graph,
            ranks=num_ranks,
            devices_per_rank=counts,
            device=kinds,
            schedules=(order,),
        )
        best_s = best_step_s(graph, rates(kinds, counts), most, order)
        assert best_s is not None
        gaps.append(plan.predicted.step_s / best_s - 1)
        # What the plan says of its step is what ranks take for its stages.
        ranks = [stage.rank for stage in plan.stages]
        stages = [plan.stage_of[work.ops[0]] for work in graph.works]
        counted_s = step_of(graph, stages, ranks, rates(kinds, counts), order)
        assert plan.predicted.step_s == pytest.approx(counted_s, rel=1e-6)
    assert min(gaps) > -1e-6
    assert max(gaps) < 0.1
    assert sum(gap < 1e-6 for gap in gaps) > 0.8 * len(gaps)


@settings(max_examples=15, deadline=None)
@given(
    graph=work_graphs(),
    counts=st.lists(st.sampled_from([1, 2]), min_size=2, max_size=3),
    kinds=st.lists(st.sampled_from(["cpu", "v5e"]), min_size=3, max_size=3),
)
def test_plans_for_any_ranks_are_sound_and_come_back_from_json(
    graph: WorkGraph, counts: list[int], kinds: list[str]
) -> None:
    if len(graph.works) < len(counts):
        return
    plan = make_plan(
        graph,
        rows=8,
        ranks=len(counts),
        devices_per_rank=counts,
        device=kinds[: len(counts)],
        replicas=(1,),
        schedules=("1f1b", "dag", "list"),
    )
    check(plan, graph)
    assert [rank.devices for rank in plan.ranks] == counts
    assert [rank.device for rank in plan.ranks] == kinds[: len(counts)]
    text = plan.to_json()
    assert PipelinePlan.from_json(text).to_json() == text


def test_a_small_rank_gets_what_fits_it() -> None:
    graph = chain([1e6] * 6)
    small = device("small", 5e9, memory_bytes=4000 * 1 + 2000)
    plan = planned(graph, ranks=2, device=[PLAIN, small])
    assert [rank.capacity_bytes for rank in plan.ranks] == [2**40, 6000]
    assert sum(len(s.ops) for s in plan.stages if s.rank == 1) == 1
    free = planned(graph, ranks=2, device=[PLAIN, device("small", 5e9)])
    assert sum(len(s.ops) for s in free.stages if s.rank == 1) == 5


def test_if_nothing_fits_the_rank_that_lacks_most_is_told() -> None:
    small = device("small", 5e9, memory_bytes=3000)
    text = "fits 2.9 KiB of a device, got at least .* on rank 1 .* with 2 ranks, 1x1, 1"
    with pytest.raises(ValueError, match=text) as caught:
        planned(chain([1e6] * 6), ranks=2, device=[PLAIN, small])
    assert "3 rows a step: still needs 3.9 KiB" in str(caught.value)
    assert "the ranks" not in str(caught.value)


def test_equal_ranks_are_planned_alike_however_they_are_given() -> None:
    asked: dict[str, Any] = {"rows": 32, "ranks": 2, "replicas": (1,)}
    one = make_plan(uneven_gpt(), device="v5e", devices_per_rank=2, **asked)
    same = make_plan(
        uneven_gpt(), device=["v5e", "v5e"], devices_per_rank=[2, 2], **asked
    )
    assert one == same


@pytest.mark.parametrize("strategy", [*strategies_for(2)], ids=lambda s: s.text)
def test_costs_are_those_of_equal_ranks_where_all_share_alike(
    strategy: Strategy,
) -> None:
    asked: dict[str, Any] = {
        "rows": 16,
        "ranks": 2,
        "devices_per_rank": 2,
        "replicas": (1,),
        "microbatches": (4,),
        "schedules": ("zb1p",),
        "stages": [["embed", *(f"layers.{n}" for n in range(6))], ["head"]],
        "device": "v5e",
    }
    own = make_plan(uneven_gpt(), rank_sharding=[strategy.text] * 2, **asked)
    alike = make_plan(
        uneven_gpt(),
        meshes=((strategy.data, strategy.model),),
        sharding=strategy.presets,
        **asked,
    )
    assert own.predicted == alike.predicted
    assert own.ranks == alike.ranks


def test_strategies_are_read_as_they_are_written() -> None:
    for strategy in strategies_for(8):
        assert Strategy.from_text(strategy.text) == strategy
    for text in ("", "2", "tp:2x1", "fsdp:1x2", "0x1", "dp:2x"):
        with pytest.raises(ValueError, match="such as fsdp:2x1, got"):
            Strategy.from_text(text)


def test_each_rank_has_what_is_asked_of_it() -> None:
    plan = make_plan(
        uneven_gpt(),
        rows=32,
        ranks=3,
        devices_per_rank=[1, 2, 4],
        device="v5e",
        replicas=(1,),
        microbatches=(8,),
        schedules=("1f1b", "list"),
        rank_sharding=["1x1", "fsdp:2x1", "dp:2x2"],
    )
    check(plan, uneven_gpt())
    assert [dict(rank.mesh) for rank in plan.ranks] == [
        {},
        {"data": 2},
        {"data": 2, "model": 2},
    ]
    assert [rank.rules for rank in plan.ranks] == [(), ("fsdp",), ("dp", "tp")]
    axes = {(plan.stages[c.stage].rank, c.axis) for c in plan.predicted.collectives}
    assert axes <= {(1, "data"), (2, "data"), (2, "model")} and axes
    with pytest.raises(ValueError, match="or of ranks that differ. Plan again"):
        plan.load()


def test_memory_is_counted_by_the_strategy_of_the_rank() -> None:
    plan = make_plan(
        gpt(4),
        rows=32,
        ranks=2,
        devices_per_rank=[1, 2],
        device="v5e",
        replicas=(1,),
        rank_sharding=["1x1", "fsdp:2x1"],
    )
    first, second = plan.ranks
    changed = dataclasses.replace(plan, ranks=(first, first))
    assert faults_in(plan, gpt(4)) == []
    assert any("rank 1: expected the stated" in f for f in faults_in(changed, gpt(4)))
    assert second.mesh == {"data": 2}


def test_rules_say_what_each_rank_splits() -> None:
    rules = AxisRules(parameters={"*": ("mlp", None)})
    asked: dict[str, Any] = {
        "rows": 16,
        "ranks": 2,
        "devices_per_rank": [1, 2],
        "device": "v5e",
        "replicas": (1,),
        "sharding": ("tp",),
        "rules": rules,
    }
    plan = make_plan(gpt(4, 64, 32), **asked)
    check(plan, gpt(4, 64, 32))
    assert [rank.rules for rank in plan.ranks] == [(), ("tp",)]
    with pytest.raises(ValueError, match="axes divide the dimensions that the rules"):
        make_plan(gpt(4, 64, 32), **asked | {"devices_per_rank": [1, 3]})


def planned_by(options: str, work: str) -> PipelinePlan:
    words = ["plan", "make", work, *shlex.split(options)]
    return plan_of_options(parser().parse_args(words))


@pytest.mark.parametrize("graph", [uneven_gpt(), mmt(2)], ids=["gpt", "mmt"])
def test_comparisons_of_different_ranks_are_what_their_options_give(
    graph: WorkGraph, tmp_path_factory: pytest.TempPathFactory
) -> None:
    work = str(tmp_path_factory.mktemp("plan") / "work.json")
    graph.to_json(work)
    asked = "--device v5e,v5p --memory 8GiB"
    plan = planned_by(
        f"--rows 32 --ranks 2 --devices-per-rank 1,2 {asked} --schedules 1f1b,list",
        work,
    )
    assert {a.change for a in plan.alternatives} >= {"sharding", "remat"}
    for other in plan.alternatives:
        again = planned_by(f"{other.options} {asked}", work)
        assert again.predicted.step_s == other.step_s
    text = str(plan)
    assert "2 ranks of 1 v5e, 2 v5p" in text
    assert "mesh of a rank" not in text and "devices" in text


def test_other_sequences_of_ranks_are_written_out() -> None:
    """The first stage is best on the rank that is named last."""
    graph = chain([6e6, 1e6])
    plan = planned(graph, ranks=2, device=[*KINDS[::2]], schedules=("1f1b",))
    assert [stage.rank for stage in plan.stages] == [1, 0]
    assert plan.schedule.name == "list" and plan.schedule.csv is not None
    assert [row[0].stage for row in plan.table().actions] == [1, 0]


def test_of_many_sequences_the_fast_come_first_or_last() -> None:
    kinds = [device(f"kind {n}", (1 + n) * 1e9) for n in (2, 0, 4, 1, 3)]
    graph = chain([3e6, 1e6, 5e6, 2e6, 4e6])
    plan = planned(graph, ranks=5, device=kinds, schedules=("1f1b",))
    slowest = max(
        rank.busy_s / (6 * MICROBATCHES * ROWS) for rank in plan.predicted.ranks
    )
    assert slowest < 1e-3  # Each takes 3 ms for F, I and W of a row, or not much more.


def test_named_links_tell_ranks_apart() -> None:
    slow = Link(latency_s=1.0)
    network = Network(links={(0, 1): slow, (1, 0): slow})
    plan = planned(
        chain([1e6] * 6), ranks=3, device=[*KINDS], network=network, schedules=("1f1b",)
    )
    assert [plan.stages[1].rank] == [2]


def test_replicas_repeat_the_first_ranks() -> None:
    graph = gpt(4)
    asked: dict[str, Any] = {
        "rows": 32,
        "ranks": 4,
        "device": "v5e",
        "schedules": ("1f1b", "zbv"),
    }
    plan = make_plan(graph, devices_per_rank=[1, 2, 1, 2], replicas=(2,), **asked)
    assert [rank.devices for rank in plan.ranks] == [1, 2]
    text = (
        "same sequence of ranks each, got replicas 2 of 4 ranks with 1 v5e, 2 v5e, "
        "2 v5e, 1 v5e. Repeat"
    )
    with pytest.raises(ValueError, match=text):
        make_plan(graph, devices_per_rank=[1, 2, 2, 1], replicas=(2,), **asked)
    alone = make_plan(graph, devices_per_rank=[1, 2, 2, 1], **asked)
    assert alone.batch.replicas == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"ranks": 3, "devices_per_rank": [1, 2]},
            r"devices per rank: expected one, or one for each of the ranks \(3\), got "
            "2: 1, 2. Give one, or as many",
        ),
        (
            {"device": ["v5e", "v5p"], "ranks": None, "devices": 4},
            "of which no number is given",
        ),
        (
            {"devices_per_rank": [1, 2], "devices": 4},
            "devices: expected 3, .* have 1 cpu, 2 cpu, got 4. Leave",
        ),
        (
            {"devices_per_rank": [1, 0]},
            "devices per rank: expected counts of at least 1, got 0",
        ),
        (
            {"devices_per_rank": [1, "2"]},
            "devices per rank: expected a count, got '2'. Give a whole number.",
        ),
        (
            {"devices_per_rank": [1.5, 2]},
            "devices per rank: expected a count, got 1.5. Give a whole number.",
        ),
        (
            {"devices_per_rank": [1, 2], "meshes": ((2, 1),)},
            "expected a mesh for the 1 devices of rank 0 with dp, fsdp, tp, got none",
        ),
        (
            {"devices_per_rank": [1, 2], "planner": "spp"},
            "expected planner full .* for ranks that differ, got spp. Leave",
        ),
        (
            {"devices_per_rank": [1, 2], "compare": True},
            "for ranks that differ, got a comparison. Leave",
        ),
        (
            {"devices_per_rank": [1, 2], "rank_sharding": ["1x1"]},
            r"rank sharding: expected one for each of the ranks \(2\), got 1",
        ),
        (
            {"devices_per_rank": [1, 2], "rank_sharding": ["1x1", "1x1"]},
            "expected a mesh of the 2 devices of rank 1, got 1x1. Change its mesh",
        ),
        (
            {"rows": 7, "devices_per_rank": [1, 2], "sharding": ("dp",)},
            "expected 7 rows .* take 6 rows",
        ),
    ],
)
def test_faulty_ranks_give_one_error(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_plan(gpt(2, 64, 32), **{"rows": 8, "ranks": 2} | options)


def test_a_small_rank_alone_computes_again() -> None:
    small = dataclasses.replace(
        DEVICES["v5p"], name="small", memory_bytes=1_200_000_000
    )
    plan = make_plan(
        gpt(8),
        rows=64,
        ranks=2,
        device=["v5p", small],
        replicas=(1,),
        microbatches=(8,),
        schedules=("1f1b",),
    )
    assert {(stage.rank, stage.remat) for stage in plan.stages} == {
        (0, "none"),
        (1, "full"),
    }
