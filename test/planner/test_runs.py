"""Tables of runs, and the cuts that the search finds in them."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import StageDag, stage_dags, work_graphs

from torch_xla_pp.planner.devices import DEVICES, Cluster
from torch_xla_pp.planner.evaluation import Cut, Evaluator, Setting, renumbered
from torch_xla_pp.planner.linear_orders import RunSums, linear_orders
from torch_xla_pp.planner.orders import branches_1f1b
from torch_xla_pp.planner.runs_search import OrderRuns, RunCuts, RunTables
from torch_xla_pp.planner.strategies import Strategy
from torch_xla_pp.planner.work_costs import WorkTable
from torch_xla_pp.schedule import dag_1f1b
from torch_xla_pp.work import WorkGraph

pytestmark = pytest.mark.pure

FEW = settings(max_examples=40, deadline=None)


@FEW
@given(graph=work_graphs())
def test_linear_orders_keep_the_edges(graph: WorkGraph) -> None:
    weights = [float(i % 3) for i in range(len(graph.works))]
    for order in linear_orders(graph.edges, weights):
        assert sorted(order) == list(range(len(weights)))
        places = {work: place for place, work in enumerate(order)}
        assert all(places[p] < places[c] for p, c in graph.edges)


def kept_values(table: WorkTable, run: set[int]) -> set[int]:
    """Return what a run keeps: a view that it makes is a part of another value."""
    found = set()
    for value, keepers in enumerate(table.keepers):
        if run & set(keepers):
            while table.wholes[value] >= 0 and table.producers[value] in run:
                value = int(table.wholes[value])
            found.add(value)
    return found


@FEW
@given(graph=work_graphs(), data=st.data())
def test_tables_of_runs_say_what_is_in_each_run(
    graph: WorkGraph, data: st.DataObject
) -> None:
    table = WorkTable(graph)
    count = table.num_works
    order = data.draw(st.sampled_from(linear_orders(graph.edges, [1.0] * count)))
    sizes = np.arange(1.0, len(graph.values) + 1)
    runs = RunSums(order)
    wholes = table.wholes.tolist()
    kept = runs.keeping(table.keepers, table.producers, wholes).sums(sizes)
    entering = runs.entering(table.producers, table.users).sums(sizes)
    sums = runs.sums(np.arange(float(count)))
    for first in range(count):
        for last in range(first, count):
            run = set(order[first : last + 1])
            assert sums[first, last] == sum(run)
            assert kept[first, last] == sum(
                sizes[value] for value in kept_values(table, run)
            )
            assert entering[first, last] == sum(
                size
                for made, used, size in zip(
                    table.producers, table.users, sizes, strict=True
                )
                if made not in run and run & set(used)
            )


def stage_facts(
    evaluator: Evaluator, cut: Cut, remat: str
) -> list[tuple[float, float, float]]:
    """Time, state and saved bytes of each stage, as the evaluation counts them."""
    held = evaluator.evaluate(cut)
    costs = held.costs
    return [
        (
            costs.seconds[stage, "F"] + costs.seconds[stage, "B"],
            held.ranks[stage].state,
            costs.saved_bytes[stage],
        )
        for stage in range(cut.setting.num_stages)
    ]


@FEW
@given(graph=work_graphs(), remat=st.sampled_from(["none", "full"]))
def test_a_run_costs_what_the_evaluation_says(graph: WorkGraph, remat: str) -> None:
    count = len(graph.works)
    cluster = Cluster(device=DEVICES["cpu"], num_devices=1)
    evaluator = Evaluator(table=WorkTable(graph), cluster=cluster)
    works = evaluator.works(Strategy(), 4)
    tables = RunTables(OrderRuns(tuple(range(count)), works.table), works, [remat])
    for middle in range(1, count):
        stages = (0,) * middle + (1,) * (count - middle)
        cut = Cut(
            setting=Setting(num_ranks=2, rows=4, num_microbatches=2),
            stages=stages,
            remat=(remat, remat),
        )
        facts = stage_facts(evaluator, cut, remat)
        for (time, state, saved), run in zip(
            facts, [(0, middle - 1), (middle, count - 1)], strict=True
        ):
            assert tables.loads[remat][run] == pytest.approx(time, rel=1e-9)
            assert tables.state[run] == pytest.approx(state, abs=2)
            if not run[0]:
                continue
            # The tables count whole values where views alone are kept, and what a stage
            # receives though no backward of it reads that.
            if any(value.view_of or value.unread_by for value in graph.values):
                assert tables.saved[remat][run] >= saved - 1
            else:
                assert tables.saved[remat][run] == pytest.approx(saved, abs=1)


@FEW
@given(
    graph=work_graphs(),
    schedule=st.sampled_from(["1f1b", "dag", "list"]),
    share=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_within_a_limit_a_cut_is_what_it_is_without(
    graph: WorkGraph, schedule: str, share: float
) -> None:
    cluster = Cluster(device=DEVICES["cpu"], num_devices=1)

    def evaluator() -> Evaluator:
        return Evaluator(table=WorkTable(graph), cluster=cluster)

    half = len(graph.works) // 2
    cut = Cut(
        setting=Setting(num_ranks=2, rows=4, num_microbatches=4, schedule=schedule),
        stages=(0,) * half + (1,) * (len(graph.works) - half),
        remat=("none", "none"),
        placement=(0, 1) if schedule == "list" else (),
    )
    whole = evaluator().evaluate(cut)
    limited = evaluator()
    for _ in range(2):
        found = limited.evaluate_within(share * whole.step_s, cut)
        if share < 1:
            assert found is None
            continue
        assert found is not None
        assert found.sort_key == whole.sort_key
        assert (found.ranks, found.costs) == (whole.ranks, whole.costs)
    assert limited.evaluate(cut).sort_key == whole.sort_key


@FEW
@given(graph=work_graphs(max_works=7), data=st.data())
def test_the_least_bottleneck_is_found(graph: WorkGraph, data: st.DataObject) -> None:
    count = len(graph.works)
    cluster = Cluster(device=DEVICES["cpu"], num_devices=1)
    works = Evaluator(table=WorkTable(graph), cluster=cluster).works(Strategy(), 2)
    tables = RunTables(
        OrderRuns(tuple(range(count)), works.table), works, ["none", "full"]
    )
    most = float(tables.state[0, -1] + 3 * tables.saved["none"][0, -1])
    capacity = data.draw(st.floats(0, most)) if most else 0.0
    lives = [float(f) for f in range(1, count + 1)]
    found = RunCuts(tables, lives, capacity)
    for num_stages in range(1, count + 1):
        least = np.inf
        for cuts in combinations(range(1, count), num_stages - 1):
            ends = [*cuts, count]
            worst, first = 0.0, 0
            for number, end in enumerate(ends):
                times, _ = tables.times(num_stages - number, capacity)
                worst = max(worst, float(times[first, end - 1]))
                first = end
            least = min(least, worst)
        division = found.division(num_stages)
        if division is None:
            assert least == np.inf
            continue
        assert division.bottleneck_s == pytest.approx(least, rel=1e-12)
        assert sorted(set(division.stages)) == list(range(num_stages))


def test_stages_that_use_each_other_in_a_circle_have_no_numbers() -> None:
    edges = [(0, 1), (1, 2)]
    assert renumbered([0, 1, 0], edges) is None
    assert renumbered([5, 5, 2], edges) == (0, 0, 1)


@FEW
@given(dag=stage_dags(), num_microbatches=st.integers(1, 9))
def test_the_order_for_branches_is_that_of_the_builder(
    dag: StageDag, num_microbatches: int
) -> None:
    placement = {stage: stage for stage in range(dag.num_stages)}
    built = dag_1f1b(dag.edges, placement, num_microbatches)
    found = branches_1f1b(dag.num_stages, num_microbatches, dag.edges)
    assert found == built
