"""Plans with an order of their own, and ranks with any number of stages."""

import random
from dataclasses import replace

import pytest
from planner_models import candle, joined_branches, mmt, uneven_gpt

from torch_xla_pp.planner import PipelinePlan, check, make_plan
from torch_xla_pp.planner.devices import DEVICES, Cluster, DeviceSpec
from torch_xla_pp.planner.evaluation import Cut, Evaluator, Setting
from torch_xla_pp.planner.moves import neighbours
from torch_xla_pp.planner.orders import (
    LIST_RULES,
    LISTED,
    OrderRule,
    listed_order,
    usual_placement,
)
from torch_xla_pp.planner.work_costs import WorkTable
from torch_xla_pp.schedule import one_f_one_b, zb1p, zbv
from torch_xla_pp.simulate import (
    Costs,
    Link,
    Network,
    chain_flows,
    stage_seconds,
    step_seconds,
)
from torch_xla_pp.work import WorkGraph

pytestmark = pytest.mark.pure


def steps_of(
    rules: tuple[OrderRule, ...], num_ranks: int, count: int, costs: Costs, net: Network
) -> list[float]:
    found = []
    for rule in rules:
        listed = listed_order(rule, tuple(range(num_ranks)), count, costs, net)
        if listed is not None:
            _, step_s = listed
            found.append(step_s)
    return found


def test_on_chains_the_best_listed_order_is_no_worse_than_those_of_builders() -> None:
    draw = random.Random(0)
    alone = tuple(rule for rule in LIST_RULES if rule.builder == LISTED)
    ratios = []
    for _ in range(200):
        num_ranks = draw.randint(2, 5)
        count = num_ranks * draw.choice([1, 2, 3])
        spread = draw.choice([0.0, 0.3, 0.9])

        def time(spread: float = spread) -> float:
            return 1 + spread * draw.uniform(-1, 1)

        costs = Costs(
            seconds=stage_seconds((time(), time(), time()) for _ in range(num_ranks)),
            flows=chain_flows(num_ranks),
        )
        net = Network(default=Link(latency_s=draw.choice([0.0, 0.05, 0.3])))
        built = [
            step_seconds(order, costs, net)
            for order in (one_f_one_b(num_ranks, count), zb1p(num_ranks, count))
        ]
        assert min(steps_of(LIST_RULES, num_ranks, count, costs, net)) <= min(built)
        listed = min(steps_of(alone, num_ranks, count, costs, net))
        ratios.append(listed / min(built))
    assert sum(ratios) / len(ratios) < 1
    assert max(ratios) < 1.1


def test_stages_are_where_the_builders_have_them() -> None:
    assert usual_placement("zbv", 3, 2) == tuple(zbv(3, 6).placement.values())
    assert usual_placement("zb1p", 3, 2) == tuple(zb1p(3, 6, 2).placement.values())


def test_a_join_is_cut_off_the_branch_on_its_rank() -> None:
    plans = {
        name: make_plan(
            joined_branches(),
            rows=4,
            ranks=2,
            replicas=(1,),
            microbatches=(4,),
            schedules=(name,),
            has_own_inputs=True,
            device=replace(DeviceSpec.named("cpu"), sends_inside=False),
        )
        for name in ("dag", "list")
    }
    plan = plans["list"]
    assert len(plans["dag"].stages) == 2 and len(plan.stages) == 3
    assert sorted(stage.rank for stage in plan.stages) in ([0, 0, 1], [0, 1, 1])
    assert plan.stages[2].ops == ("join_op",)
    assert plan.predicted.step_s < 0.9 * plans["dag"].predicted.step_s


@pytest.mark.parametrize(
    "graph", [mmt(2), candle(3), uneven_gpt()], ids=lambda graph: graph.source
)
def test_a_listed_plan_is_sound_and_written_out(graph: WorkGraph) -> None:
    plans = {
        name: make_plan(
            graph,
            rows=32,
            ranks=4,
            device="v5e",
            replicas=(1,),
            schedules=(name,),
            has_own_inputs=True,
        )
        for name in ("1f1b", "zb1p", "dag", "list")
    }
    plan = plans.pop("list")
    check(plan, graph)
    read = PipelinePlan.from_json(plan.to_json())
    assert read == plan and read.table() == plan.table()
    assert read.table().to_csv() == plan.schedule.csv
    assert plan.predicted.step_s <= min(p.predicted.step_s for p in plans.values())


def test_stages_change_ranks_where_a_link_is_slow() -> None:
    slow = Link(latency_s=1e-2, bytes_per_s=1e8)
    links = {pair: slow for pair in ((0, 1), (1, 0))}
    network = Network(default=Link(latency_s=1e-6, bytes_per_s=1e11), links=links)
    plan = make_plan(
        uneven_gpt(),
        rows=16,
        ranks=3,
        device="v5e",
        replicas=(1,),
        microbatches=(8,),
        schedules=("1f1b", "list"),
        network=network,
    )
    assert plan.schedule.name == "list"
    ranks = [stage.rank for stage in plan.stages]
    crossed = {frozenset((ranks[p], ranks[c])) for p, c in plan.edges}
    assert frozenset((0, 1)) not in crossed
    check(plan, uneven_gpt())


def test_changes_of_a_listed_cut_leave_no_rank_without_a_stage() -> None:
    graph = mmt(2)
    cluster = Cluster(device=DEVICES["v5e"], num_devices=2)
    evaluator = Evaluator(table=WorkTable(graph), cluster=cluster)
    setting = Setting(num_ranks=2, rows=4, num_microbatches=4, schedule=LISTED)
    count = evaluator.table.num_works
    cut = Cut(
        setting=setting,
        stages=tuple(3 * work // count for work in range(count)),
        remat=("none",) * 3,
        placement=(0, 0, 1),
    )
    near = [*neighbours(evaluator, evaluator.evaluate(cut), ("none", "full"))]
    assert {other.num_stages for other in near} == {2, 3, 4}
    for other in near:
        assert {*other.placement} == {0, 1}
        assert len(other.placement) == len(other.remat) == max(other.stages) + 1
        assert all(other.stages[p] <= other.stages[c] for p, c in graph.edges)
    exchanged = replace(cut, placement=(0, 1, 0))
    assert exchanged in near
