"""Trees of works, and stages that are branches."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import series_parallel_graphs, work_graphs

from torch_xla_pp.planner.branch_search import (
    BranchCuts,
    BranchTables,
    cut_branches,
    least_bottlenecks,
)
from torch_xla_pp.planner.devices import DEVICES, Cluster
from torch_xla_pp.planner.evaluation import Evaluator, renumbered
from torch_xla_pp.planner.runs_search import OrderRuns
from torch_xla_pp.planner.strategies import Strategy
from torch_xla_pp.planner.work_costs import WorkTable
from torch_xla_pp.planner.work_tree import WorkTree, tree_of
from torch_xla_pp.work import WorkGraph

pytestmark = pytest.mark.pure

MANY = settings(max_examples=200, deadline=None)
Stages = tuple[frozenset[int], ...]


def tables_of(graph: WorkGraph) -> BranchTables:
    cluster = Cluster(device=DEVICES["cpu"], num_devices=1)
    works = Evaluator(table=WorkTable(graph), cluster=cluster).works(Strategy(), 2)
    tree = tree_of(graph.ancestors, sum(works.seconds).tolist())  # type: ignore[union-attr]
    order = OrderRuns(tree.works, works.table)
    return BranchTables(tree, order, works, ["none", "full"])


@MANY
@given(graph=work_graphs(max_works=9))
def test_a_tree_has_all_works_and_keeps_the_data_flow(graph: WorkGraph) -> None:
    tree = tree_of(graph.ancestors, [1.0] * len(graph.works))
    assert sorted(tree.works) == list(range(len(graph.works)))
    places = {work: place for place, work in enumerate(tree.works)}
    assert all(places[p] < places[c] for p, c in graph.edges)
    check_branches(tree, graph)


def check_branches(tree: WorkTree, graph: WorkGraph) -> None:
    assert [w for part in tree.parts for w in part.works] in ([], [*tree.works])
    if tree.kind == "branches":
        for part in tree.parts:
            others = set(tree.works) - set(part.works)
            for work in part.works:
                assert not any(graph.ancestors[work] >> other & 1 for other in others)
    for part in tree.parts:
        check_branches(part, graph)


def cuts_of(tree: WorkTree) -> Iterator[Stages]:
    """All stages of the space that the search declares, written a second time."""
    if tree.kind == "work":
        yield (frozenset(tree.works),)
        return
    yield from rest_of(tree.parts)


def rest_of(parts: tuple[WorkTree, ...]) -> Iterator[Stages]:
    if not parts:
        yield ()
        return
    for end in range(1, len(parts) + 1):
        run = frozenset(work for part in parts[:end] for work in part.works)
        for rest in rest_of(parts[end:]):
            yield (run, *rest)
    if parts[0].kind != "work":
        for own in cuts_of(parts[0]):
            if len(own) > 1:
                for rest in rest_of(parts[1:]):
                    yield (*own, *rest)


def depths_of_tree(tree: WorkTree, stages: Stages) -> dict[frozenset[int], int]:
    """Depth of each stage if parts of a series follow each other."""
    found: dict[frozenset[int], int] = {}
    fill_depths(tree, stages, 0, found)
    return found


def fill_depths(
    tree: WorkTree, stages: Stages, after: int, found: dict[frozenset[int], int]
) -> int:
    whole = next((s for s in stages if s >= set(tree.works)), None)
    if whole is not None:
        return found.setdefault(whole, after + 1)
    if tree.kind == "branches":
        return max(fill_depths(part, stages, after, found) for part in tree.parts)
    for part in reversed(tree.parts):
        after = fill_depths(part, stages, after, found)
    return after


@MANY
@given(graph=series_parallel_graphs(), data=st.data())
def test_the_least_bottleneck_of_branches_is_found(
    graph: WorkGraph, data: st.DataObject
) -> None:
    tables = tables_of(graph)
    tree, order = tables.tree, tables.tree.works
    places = {work: place for place, work in enumerate(order)}
    most = float(tables.runs.state[0, -1] + tables.runs.saved["none"][0, -1])
    capacity = data.draw(st.floats(0.2, 2)) * most
    num_ranks = data.draw(st.integers(1, min(5, len(order))))
    lives = [float(f) for f in range(1, num_ranks + 1)]
    times = [tables.runs.times(live, capacity)[0] for live in lives]
    least = np.full((num_ranks + 1, num_ranks + 1), np.inf)
    for stages in set(cuts_of(tree)):
        if len(stages) > num_ranks:
            continue
        depths = depths_of_tree(tree, stages)
        worst = 0.0
        for stage, depth in depths.items():
            first, last = min(map(places.get, stage)), max(map(places.get, stage))
            worst = max(worst, float(times[depth - 1][first, last]))
        deepest = max(depths.values())
        for bound in range(deepest, num_ranks + 1):
            least[len(stages), bound] = min(least[len(stages), bound], worst)
    found = least_bottlenecks(tables, num_ranks, lives, capacity)
    np.testing.assert_allclose(found[1:, 1:], least[1:, 1:], rtol=1e-4)
    for division in cut_branches(tables, num_ranks, lives, capacity):
        numbers = renumbered(division.stages, graph.edges)
        assert numbers is not None
        assert len(set(numbers)) == len(division.remat) == num_ranks
        worst = 0.0
        labels = dict(enumerate(division.stages))
        groups = tuple(
            frozenset(w for w, label in labels.items() if label == stage)
            for stage in range(num_ranks)
        )
        depths = depths_of_tree(tree, groups)
        for stage, depth in depths.items():
            first, last = min(map(places.get, stage)), max(map(places.get, stage))
            worst = max(worst, float(times[depth - 1][first, last]))
        assert worst == pytest.approx(division.bottleneck_s, rel=1e-4)


@MANY
@given(graph=series_parallel_graphs(), data=st.data())
def test_stages_found_without_a_bound_are_those_with_one_if_they_fit(
    graph: WorkGraph, data: st.DataObject
) -> None:
    tables = tables_of(graph)
    most = float(tables.runs.state[0, -1] + tables.runs.saved["none"][0, -1])
    capacity = data.draw(st.floats(0.2, 3)) * most
    count = data.draw(st.integers(1, min(5, len(tables.tree.works))))
    lives = [float(f) for f in range(1, count + 1)]
    free = BranchCuts(tables, count + 1, (1.0,), np.inf)
    bound = cut_branches(tables, count, lives, capacity)
    fits = free.fit(count, lives, capacity)
    assert not fits or free.divisions(count) == bound
    assert fits or capacity < lives[-1] * most
