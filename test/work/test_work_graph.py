"""Works and values, their laws, and their JSON."""

import dataclasses
import json

import pytest
from hypothesis import given
from strategies import work_graphs

from torch_xla_pp.work import Amount, Cost, Work, WorkGraph, WorkParameter, WorkValue

pytestmark = pytest.mark.pure


def work(name: str, **changes: object) -> Work:
    return dataclasses.replace(
        Work(
            name=name,
            ops=(f"{name}_op",),
            module="",
            digest="d",
            forward=Cost(flops_per_row=2, bytes=3),
            backward_input=Cost(),
            backward_weight=Cost(),
            saved={"none": Amount(bytes_per_row=1), "full": Amount()},
        ),
        **changes,  # type: ignore[arg-type]
    )


def value(name: str, producer: str | None, *users: str) -> WorkValue:
    return WorkValue(
        name=name,
        bytes_per_row=4,
        bytes=0,
        has_gradient=True,
        producer=producer,
        users=users,
    )


def diamond() -> WorkGraph:
    return WorkGraph(
        works=tuple(map(work, "abcd")),
        values=(
            value("x", None, "a"),
            value("a1", "a", "b", "c"),
            value("b1", "b", "d"),
            value("c1", "c", "d"),
            value("y", "d"),
        ),
        rows=2,
        outputs=("y",),
    )


@pytest.mark.parametrize(
    ("views", "text"),
    [
        ({"y": "a1"}, "value y: expected it to be a view .* d makes or uses, got a1"),
        ({"x": "a1"}, "value x: .* a work makes or uses, got a1"),
        ({"y": "b1", "b1": "b2"}, "value b1: .* got b2"),
        ({"b1": "b3", "b3": "b1"}, "views of one another: b1, b3"),
    ],
)
def test_views_are_of_values_that_their_producers_have(
    views: dict[str, str], text: str
) -> None:
    graph = diamond()
    values = (*graph.values, value("b3", "b"))
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(
            graph,
            values=tuple(
                dataclasses.replace(v, view_of=views.get(v.name)) for v in values
            ),
        )


def test_edges_and_ancestors_follow_from_values() -> None:
    graph = diamond()
    assert graph.edges == ((0, 1), (0, 2), (1, 3), (2, 3))
    assert graph.ancestors == (0b0, 0b1, 0b1, 0b111)


def test_costs_are_affine_in_rows() -> None:
    cost = Cost(flops_per_row=2, flops=1, bytes_per_row=3, bytes=5)
    assert cost.of(10) == (21, 35)
    assert (cost + cost).of(10) == (42, 70)
    assert (Amount(bytes_per_row=2) + Amount(bytes=1)).of(4) == 9


@given(graph=work_graphs())
def test_json_brings_back_the_graph(graph: WorkGraph) -> None:
    text = graph.to_json()
    read = WorkGraph.from_json(text)
    assert read == graph
    assert read.digest == graph.digest
    assert read.to_json() == text


def test_the_digest_does_not_depend_on_rows() -> None:
    graph = diamond()
    assert dataclasses.replace(graph, rows=9).digest == graph.digest
    other = dataclasses.replace(graph, works=(work("a", ops=("z",)), *graph.works[1:]))
    assert other.digest != graph.digest


def test_all_faults_of_a_graph_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="work graph") as caught:
        WorkGraph(
            works=(work("a"), work("a"), work("b", ops=("a_op",))),
            values=(value("v", "b", "a", "nobody"),),
            rows=0,
            outputs=("w",),
        )
    text = str(caught.value)
    for part in (
        "expected at least 1 row, got 0",
        "expected work a once, got it 2 times",
        "expected operation a_op once, got it 3 times",
        "expected known works, got nobody",
        "expected users after b, got a",
        "expected outputs among the values, got w",
    ):
        assert part in text


def test_tied_parameters_have_one_size() -> None:
    one, two = (
        WorkParameter(name=n, shape=(s,), dtype="float32", bytes=4 * s, tied="t")
        for n, s in (("p", 1), ("q", 2))
    )
    works = (work("a", parameters=(one,)), work("b", parameters=(two,)))
    with pytest.raises(ValueError, match="p and q of one size, got 4 and 8 bytes"):
        WorkGraph(works=works, values=(), rows=1, outputs=())


def test_all_faults_of_a_file_are_told_at_once() -> None:
    data = json.loads(diamond().to_json())
    data["works"][1]["forward"]["flops"] = "many"
    data["works"][2]["color"] = "red"
    data["values"][0]["bytes_per_row"] = float("nan")
    data["works"][3]["forward"]["bytes"] = -1.0
    del data["rows"]
    with pytest.raises(ValueError, match="torch_xla_pp work 1") as caught:
        WorkGraph.from_json(json.dumps(data) + "\n")
    lines = str(caught.value).split("\n")
    assert len(lines) == 5
    for part in (
        "works[1].forward.flops: expected a finite number, got 'many'",
        "works[2].color: expected no such field",
        "values[0].bytes_per_row: expected a finite number, got nan",
        "works[3].forward: cost: expected finite numbers of at least 0, got bytes=-1.0",
        "rows: expected this field, got none",
    ):
        assert any(part in line for line in lines), part


@pytest.mark.parametrize("text", ["no json\n", "{}\n", '{"format": "other"}\n', "[]\n"])
def test_another_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="torch_xla_pp work 1: expected"):
        WorkGraph.from_json(text)
