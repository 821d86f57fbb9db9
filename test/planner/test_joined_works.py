"""Searches that see joined works, and plans that have all of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_models import WorkBuilder, gpt, mmt
from strategies import series_parallel_graphs, work_graphs

from torch_xla_pp.planner import (
    MeasuredCosts,
    RowSeconds,
    WorkSeconds,
    check,
    make_plan,
)
from torch_xla_pp.planner.devices import DEVICES, Cluster
from torch_xla_pp.planner.evaluation import Evaluator
from torch_xla_pp.planner.joined_works import (
    joined_evaluator,
    joined_graph,
    joined_groups,
)
from torch_xla_pp.planner.search import best_of, search
from torch_xla_pp.planner.settings import Request
from torch_xla_pp.planner.work_costs import WorkTable
from torch_xla_pp.work import Amount, WorkGraph

pytestmark = pytest.mark.pure


@settings(max_examples=100, deadline=None)
@given(graph=work_graphs(8) | series_parallel_graphs(8), data=st.data())
def test_joined_works_are_all_works_in_the_order_of_data_flow(
    graph: WorkGraph, data: st.DataObject
) -> None:
    count = len(graph.works)
    weights = [float(data.draw(st.integers(0, 5))) for _ in range(count)]
    most = data.draw(st.integers(1, count))
    groups = joined_groups(graph, weights, most)
    assert len(set(groups)) <= most
    assert all(groups[p] <= groups[c] for p, c in graph.edges)
    joined = joined_graph(graph, groups)
    assert sorted(op for w in joined.works for op in w.ops) == sorted(
        op for w in graph.works for op in w.ops
    )
    for kind in ("forward", "backward_input", "backward_weight"):
        flops = [sum(getattr(w, kind).flops for w in g.works) for g in (graph, joined)]
        assert flops[0] == pytest.approx(flops[1])
    assert {p.name for w in joined.works for p in w.parameters} == {
        p.name for w in graph.works for p in w.parameters
    }
    edges = {(groups[p], groups[c]) for p, c in graph.edges}
    assert {*joined.edges} == {(p, c) for p, c in edges if p != c}


@settings(max_examples=50, deadline=None)
@given(graph=work_graphs(8), data=st.data())
def test_stages_of_joined_works_save_what_those_of_all_works_do(
    graph: WorkGraph, data: st.DataObject
) -> None:
    count = len(graph.works)
    groups = joined_groups(graph, [1.0] * count, data.draw(st.integers(1, count)))
    joined = joined_graph(graph, groups)
    border = data.draw(st.integers(0, len(joined.works)))
    parts = [part for part in (joined.works[:border], joined.works[border:]) if part]
    stages = [[op for work in part for op in work.ops] for part in parts]
    options = {"remat": ("none",), "schedules": ("gpipe",), "microbatches": (1,)}
    found = [
        make_plan(
            works,
            rows=works.rows,
            ranks=len(stages),
            device="v5p",
            stages=stages,
            **options,  # type: ignore[arg-type]
        )
        for works in (graph, joined)
    ]
    own, of_joined = (plan.predicted.stages[0].saved_bytes for plan in found)
    # Where only views of a value are kept, joined works count the whole value.
    if any(value.view_of for value in graph.values):
        assert own <= of_joined + 1
    else:
        assert own == pytest.approx(of_joined, abs=1)


def test_a_value_within_joined_works_is_kept_as_their_own() -> None:
    build = WorkBuilder(4)
    at = build.given("x", 10)
    for number in range(3):
        at = build.add(f"w{number}", [at], 10 * (number + 1), 1.0, saved=1.0)
    graph = build.graph("three")
    joined = joined_graph(graph, (0, 0, 1))
    first, second = (work.saved["none"] for work in joined.works)
    assert first == Amount(bytes_per_row=4.0 + 4.0 + 40.0)  # w0, w1, and w0's value.
    assert second == Amount(bytes_per_row=4.0)
    assert [v.name for v in joined.values] == ["x", "w1_out", "w2_out"]


def test_light_works_are_joined_first_and_branches_stay() -> None:
    graph = mmt(2)
    groups = joined_groups(graph, [1.0] * 32 + [0.1, 1.0], 10)
    assert groups[32] == groups[33]
    branches = [{*groups[:16]}, {*groups[16:32]}]
    assert not branches[0] & branches[1]
    sizes = [groups.count(group) for group in sorted({*groups})]
    assert max(sizes) <= 4


def evaluator_of(graph: WorkGraph, costs: MeasuredCosts | None = None) -> Evaluator:
    cluster = Cluster(device=DEVICES["v5p"], num_devices=8)
    table = WorkTable(graph, costs)
    return Evaluator(table=table, cluster=cluster, has_own_inputs=True)


def costs_of(graph: WorkGraph) -> MeasuredCosts:
    """Return times that are longer for works that compute more."""
    kinds = {work.digest: work for work in graph.works}
    lines = {
        digest: RowSeconds(
            seconds_per_row=1e-3 * len(digest), seconds=1e-9 * work.forward.of(1)[0]
        )
        for digest, work in kinds.items()
    }
    return MeasuredCosts(
        device="v5p",
        rows=(1, 64),
        action_s=1e-3,
        works=tuple(
            WorkSeconds(
                digest=digest,
                name=digest,
                forward=line,
                backward=RowSeconds.added([line, line]),
                backward_input=line,
                backward_weight=line,
            )
            for digest, line in lines.items()
        ),
    )


def test_measured_times_of_joined_works_are_sums() -> None:
    graph = mmt(2)
    costs = costs_of(graph)
    whole = evaluator_of(graph, costs)
    joined = joined_evaluator(whole, 10)
    assert joined.table.num_works <= 10
    for kind, lines in joined.table.measured_lines.items():
        groups = np.array(joined.groups)
        for column in range(2):
            own = whole.table.measured_lines[kind][:, column]
            assert lines[:, column] == pytest.approx(np.bincount(groups, own))


@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize("graph", [gpt(20, 512, 256), mmt(4)], ids=lambda g: g.source)
def test_cuts_of_joined_works_cost_what_they_cost_with_all(
    graph: WorkGraph, is_measured: bool
) -> None:
    whole = evaluator_of(graph, costs_of(graph) if is_measured else None)
    joined = joined_evaluator(whole, 30)
    assert joined.table.num_works <= 30
    request = Request(rows=64, num_ranks=8, devices_per_rank=1, replicas=(1,))
    best = best_of(search(request, joined))
    again = whole.evaluate(
        joined.whole_cut(best.cut), (best.rule,) if best.rule else ()
    )
    assert (again.step_s, again.ranks) == (best.step_s, best.ranks)
    assert best.step_s < 1.1 * best_of(search(request, whole)).step_s


def test_thousands_of_works_are_planned() -> None:
    graph = gpt(1000, 256, 64)
    plan = make_plan(
        graph,
        rows=64,
        ranks=8,
        device="v5p",
        microbatches=(16,),
        replicas=(1,),
        schedules=("1f1b", "zb1p"),
        memory_bytes=2**40,
    )
    check(plan, graph)
    assert sum(len(stage.ops) for stage in plan.stages) == 2002
    assert plan.predicted.bubble < 0.2
