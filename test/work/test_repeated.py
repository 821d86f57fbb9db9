"""Deeper models by repeating a layer."""

from dataclasses import replace

import pytest
from planner_models import gpt, mmt, uneven_gpt

from torch_xla_pp.planner import make_plan
from torch_xla_pp.work import Work, WorkGraph, WorkValue

pytestmark = pytest.mark.pure


def shape_of(graph: WorkGraph) -> object:
    """What a graph is, without the names of works, operations and values."""

    def work_of(work: Work) -> Work:
        ops = tuple(str(n) for n in range(len(work.ops)))
        return replace(work, name="", ops=ops)

    def value_of(value: WorkValue) -> object:
        index = graph.index
        return (
            None if value.producer is None else index[value.producer],
            tuple(index[user] for user in value.users),
            tuple(index[keeper] for keeper in value.kept_by),
            tuple(index[passer] for passer in value.passed_by),
            tuple(index[passer] for passer in value.passed_again_by),
            replace(value.with_works(lambda _: ()), name="", producer=None),
        )

    values = sorted(map(repr, map(value_of, graph.values)))
    return [work_of(work) for work in graph.works], values, graph.edges


@pytest.mark.parametrize("layers", [2, 3, 5])
def test_a_deeper_model_is_what_its_formulas_give(layers: int) -> None:
    found = gpt(layers, 64, 32).repeated("layers", 9)
    assert shape_of(found) == shape_of(gpt(9, 64, 32))


def test_a_plan_of_a_repeated_model_costs_as_that_of_the_whole_one() -> None:
    asked = {"rows": 32, "ranks": 4, "device": "v5e"}
    one = make_plan(gpt(3, 64, 32).repeated("layers", 20), **asked)  # type: ignore[arg-type]
    two = make_plan(gpt(20, 64, 32), **asked)  # type: ignore[arg-type]
    assert one.predicted.step_s == two.predicted.step_s
    assert [r.bytes for r in one.predicted.ranks] == [
        r.bytes for r in two.predicted.ranks
    ]
    assert one.stages[-1].modules == two.stages[-1].modules


def test_a_value_that_all_layers_use_gets_the_copies_as_users() -> None:
    graph = gpt(3, 64, 32)
    index = {work.module: work.name for work in graph.works}
    blocks = [index[f"layers.{n}.attention"] for n in range(3)]
    mask = WorkValue(
        name="mask",
        bytes_per_row=0,
        bytes=8,
        has_gradient=False,
        producer=None,
        users=tuple(blocks),
        kept_by=tuple(blocks),
    )
    longer = replace(graph, values=(mask, *graph.values)).repeated("layers", 6)
    assert len(longer.values[0].users) == len(longer.values[0].kept_by) == 6


def with_views(graph: WorkGraph) -> WorkGraph:
    """Let each value between layers be a view of one inside, which is one of the last.

    The first layers have no value before them to be a view of.
    """
    before = {value.producer: value.name for value in graph.values}
    found = []
    for value in graph.values:
        producers = {p for p in before if value.producer in _users(graph, before[p])}
        made = [before[p] for p in producers if p is not None]
        is_seen = value.producer in before and len(made) == 1
        found.append(replace(value, view_of=made[0] if is_seen else None))
    return replace(graph, values=tuple(found))


def _users(graph: WorkGraph, name: str) -> tuple[str, ...]:
    return next(value.users for value in graph.values if value.name == name)


def test_views_of_repeated_layers_are_of_their_own_values() -> None:
    few, many = (with_views(gpt(count, 64, 32)) for count in (3, 9))
    longer = few.repeated("layers", 9)
    assert sum(value.view_of is not None for value in longer.values) > 9

    def views(graph: WorkGraph) -> list[tuple[int, int]]:
        made = {v.name: graph.index.get(v.producer or "", -1) for v in graph.values}
        return [
            (made[v.name], made[v.view_of])
            for v in sorted(graph.values, key=lambda value: made[value.name])
            if v.view_of is not None
        ]

    assert views(longer) == views(many)


def test_as_many_layers_as_there_are_change_nothing() -> None:
    graph = gpt(4, 64, 32)
    assert graph.repeated("layers", 4) == graph


@pytest.mark.parametrize(
    ("graph", "path", "count", "text"),
    [
        (gpt(4, 64, 32), "blocks", 8, "'blocks' to name layers .* got none"),
        (gpt(4, 64, 32), "layers", 3, "at most 3 of them, got 4"),
        (gpt(1, 64, 32), "layers", 8, "got 1 layers without"),
        (mmt(2), "branches", 8, "got 2 layers without"),
    ],
)
def test_layers_that_cannot_be_repeated_are_refused(
    graph: WorkGraph, path: str, count: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        graph.repeated(path, count)


def test_two_equal_neighbours_of_many_unlike_layers_are_enough() -> None:
    assert len(uneven_gpt().repeated("layers", 30).works) == 22 + 2 * 20
