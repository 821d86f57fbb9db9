"""Stages that are given, and the rest planned around them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planner_models import gpt, mmt, uneven_gpt

from torch_xla_pp.cli import main
from torch_xla_pp.planner import PipelinePlan, check, make_plan
from torch_xla_pp.planner.given_stages import stages_of_works

pytestmark = pytest.mark.pure

GRAPH = uneven_gpt()
NAMES = [
    ["embed", *(f"layers.{n}" for n in range(3))],
    ["head", *(f"layers.{n}" for n in range(3, 10))],
]
ASKED: dict[str, Any] = {"rows": 16, "ranks": 2, "replicas": (1,), "device": "v5e"}


def test_modules_works_and_operations_name_stages() -> None:
    stages = stages_of_works(NAMES, GRAPH)
    modules = [work.module for work in GRAPH.works]
    assert stages == tuple(
        int(
            m not in ("embed",)
            and not m.startswith(("layers.0", "layers.1", "layers.2"))
        )
        for m in modules
    )
    works = [
        [w.name for w, s in zip(GRAPH.works, stages, strict=True) if s == n]
        for n in range(2)
    ]
    ops = [[op for w in GRAPH.works if w.name in own for op in w.ops] for own in works]
    assert stages_of_works(works, GRAPH) == stages
    assert stages_of_works(ops, GRAPH) == stages


def test_what_nothing_names_follows_what_it_uses() -> None:
    graph = mmt(2)
    names = [work.name for work in graph.works]
    last = names[-1]
    found = stages_of_works([[n for n in names[:4]], [names[-2]]], graph)
    assert found[graph.index[last]] == 1
    for producer, consumer in graph.edges:
        assert found[producer] <= found[consumer]


def test_the_rest_is_planned_around_given_stages() -> None:
    free = make_plan(GRAPH, **ASKED)
    plan = make_plan(GRAPH, stages=NAMES, **ASKED)
    check(plan, GRAPH)
    expected = stages_of_works(NAMES, GRAPH)
    assert [plan.stage_of[work.ops[0]] for work in GRAPH.works] == list(expected)
    assert plan.predicted.step_s >= free.predicted.step_s
    (cost,) = [other for other in plan.alternatives if other.change == "stages"]
    assert cost.step_s <= plan.predicted.step_s
    assert "stages: the given ones and not the planner's" in str(plan)
    again = make_plan(GRAPH, stages=[stage.ops for stage in free.stages], **ASKED)
    assert again.predicted.step_s == free.predicted.step_s


def test_given_stages_compute_again_where_memory_asks_for_it() -> None:
    graph, asked = (
        gpt(4, 256, 512),
        {**ASKED, "schedules": ("1f1b",), "microbatches": (4,)},
    )
    names = [["embed", "layers.0", "layers.1", "layers.2"], ["layers.3", "head"]]
    free = make_plan(graph, stages=names, remat=("none",), **asked)
    held = [rank.bytes.total for rank in free.predicted.ranks]
    tight = make_plan(
        graph, stages=names, memory_bytes=int(max(held) - 1), reserve=0.0, **asked
    )
    expected = ["full" if size == max(held) else "none" for size in held]
    assert [stage.remat for stage in tight.stages] == expected
    assert sorted(expected) == ["full", "none"]


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (
            [["embed", "layers.77"], ["head"], []],
            [
                "stage 0: expected operations, works or modules of the model, got "
                "'layers.77'. Its modules are embed, layers.0",
                "stage 2: expected names, got none",
            ],
        ),
        (
            [["embed", "layers.0"], ["layers.0", "head"]],
            ["expected in one stage, got it in 0, 1. Keep one."],
        ),
        (
            [["head"], ["embed", "layers.0"]],
            ["expected to go to higher stages, got it from stage 1, which has"],
        ),
    ],
)
def test_names_that_contradict_the_model_are_told(
    names: list[list[str]], texts: list[str]
) -> None:
    with pytest.raises(ValueError, match="stages: ") as caught:
        make_plan(GRAPH, stages=names, **ASKED)
    for text in texts:
        assert text in str(caught.value)


def test_a_work_is_not_cut_apart_by_names() -> None:
    first = replace(GRAPH.works[1], ops=("one", "two"))
    graph = replace(GRAPH, works=(GRAPH.works[0], first, *GRAPH.works[2:]))
    with pytest.raises(
        ValueError, match="got its operations in stages 0, 1. Keep one, two"
    ):
        stages_of_works([["one"], ["two"]], graph)


def test_stages_that_ranks_do_not_make_are_refused() -> None:
    three = [NAMES[0], NAMES[1][1:], NAMES[1][:1]]
    with pytest.raises(
        ValueError, match="that make the 3 given stages, got pipelines of 2 ranks"
    ):
        make_plan(GRAPH, stages=three, **ASKED)


def test_given_stages_that_do_not_fit_are_compared_with_others() -> None:
    pinned = {"remat": ("none",), "schedules": ("1f1b",), "microbatches": (16,)}
    graph, asked = gpt(6, 256, 512), {**ASKED, **pinned}
    lopsided = [["embed"], [*(f"layers.{n}" for n in range(6)), "head"]]
    plan = make_plan(graph, stages=lopsided, **asked)
    held = max(rank.bytes.total for rank in plan.predicted.ranks)
    with pytest.raises(ValueError, match="the given stages:") as caught:
        make_plan(graph, stages=lopsided, memory_bytes=held - 1, reserve=0.0, **asked)
    lines = str(caught.value).split("\n")
    assert "on rank 1" in lines[0]
    assert lines[5].startswith("  other stages: fits with ")


def test_the_command_keeps_the_stages_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work, names, out = (
        str(tmp_path / n) for n in ("work.json", "names.json", "plan.json")
    )
    GRAPH.to_json(work)
    Path(names).write_text(json.dumps(NAMES))
    options = ["plan", work, "--rows", "16", "--ranks", "2", "--replicas", "1"]
    assert (
        main([*options, "--device", "v5e", "--fix", f"stages={names}", "--output", out])
        == 0
    )
    first = capsys.readouterr().out
    assert main([*options, "--device", "v5e", "--fix", f"stages={out}"]) == 0
    assert capsys.readouterr().out == first
    stages = [stage.ops for stage in PipelinePlan.from_json(out).stages]
    for text, fault in (
        ("[[1]]", "expected a plan, or a list of lists of names, got '[[1]]'"),
        ("{}", "torch_xla_pp plan 1: expected a record with that format"),
        ("no", "stages: expected JSON, got a text that is none"),
        (json.dumps([*stages, ["ghost"]]), "got 'ghost'"),
    ):
        Path(names).write_text(text)
        assert main([*options, "--fix", f"stages={names}"]) == 1
        assert fault in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*options, "--fix", names])
