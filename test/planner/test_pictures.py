"""Pictures of plans: what ranks hold, candidates, and stages as a graph."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from planner_models import mmt, uneven_gpt

from torch_xla_pp.cli import main
from torch_xla_pp.cli.options import parser
from torch_xla_pp.cli.plan_options import plan_of_options
from torch_xla_pp.planner import (
    Candidate,
    candidates_text,
    draw_candidates,
    draw_memory,
    make_plan,
    to_dot,
)
from torch_xla_pp.planner.pictures import front_of
from torch_xla_pp.text import bytes_text

pytestmark = pytest.mark.pure

PLAN = make_plan(
    mmt(2), rows=32, ranks=4, replicas=(1, 2), device="v5p", has_own_inputs=True
)


def texts_of(picture: Path) -> str:
    """Return the texts of a picture, which matplotlib keeps as comments."""
    return " ".join(re.findall(r"<!-- (.*?) -->", picture.read_text()))


def test_memory_is_drawn_for_each_rank_with_its_parts_and_what_there_is(
    tmp_path: Path,
) -> None:
    draw_memory(PLAN, tmp_path / "memory.svg")
    found = texts_of(tmp_path / "memory.svg")
    ranks = [f"rank {number}" for number in range(len(PLAN.ranks))]
    for text in (*ranks, "parameters", "passed", "temporary", "capacity", "GiB"):
        assert text in found
    with pytest.raises(ValueError, match="is not supported"):
        draw_memory(PLAN, tmp_path / "memory.bmp_")


def test_candidates_are_drawn_with_their_front(tmp_path: Path) -> None:
    draw_candidates(PLAN, tmp_path / "candidates.svg")
    found = texts_of(tmp_path / "candidates.svg")
    for text in ("fits", "does not fit", "front", "plan", "ms of a step"):
        assert text in found
    with pytest.raises(ValueError, match="expected candidates to draw"):
        draw_candidates(replace(PLAN, candidates=()), tmp_path / "none.svg")


def candidate(step_s: float, peak_bytes: int) -> Candidate:
    return Candidate(
        label="", options="", step_s=step_s, peak_bytes=peak_bytes, fits=True
    )


def test_the_front_is_what_nothing_beats_in_time_and_memory() -> None:
    given = tuple(
        candidate(s, b) for s, b in ((1, 9), (2, 5), (3, 5), (2, 7), (4, 2), (5, 1))
    )
    front = [(one.step_s, one.peak_bytes) for one in front_of(given)]
    assert front == [(5, 1), (4, 2), (2, 5), (1, 9)]
    for one in given:
        beaten = any(
            o.step_s <= one.step_s and o.peak_bytes <= one.peak_bytes and o != one
            for o in given
        )
        assert (one in front_of(given)) != beaten


def test_the_plan_is_the_best_candidate_and_options_give_the_others(
    tmp_path: Path,
) -> None:
    best = PLAN.candidates[0]
    assert best.step_s == PLAN.predicted.step_s and best.fits
    keys = [(not one.fits, one.fits * one.step_s) for one in PLAN.candidates]
    assert keys == sorted(keys)
    work = tmp_path / "work.json"
    mmt(2).to_json(work)
    for one in PLAN.candidates[:4]:
        words = shlex.split(f"{one.options} --device v5p --own-inputs")
        options = parser().parse_args(["plan", "make", str(work), *words])
        # How many listed orders are tried is bounded, over all settings together.
        most_s = (1.05 if ", list" in one.label else 1.0) * one.step_s
        assert plan_of_options(options).predicted.step_s <= most_s
    text = candidates_text(PLAN, 3).split("\n")
    assert text[0] == f"3 of {len(PLAN.candidates)} candidates"
    assert len(text) == 5 and text[2].startswith(best.label)


def test_stages_are_nodes_in_the_cluster_of_their_rank() -> None:
    plan = make_plan(
        uneven_gpt(), rows=16, ranks=2, replicas=(1,), schedules=("zbv",), device="v5e"
    )
    text = to_dot(plan)
    clusters = re.findall(r"subgraph cluster_(\d) \{(.*?)\n  \}", text, re.DOTALL)
    placed = {
        int(stage): int(rank)
        for rank, inside in clusters
        for stage in re.findall(r"stage_(\d) \[", inside)
    }
    assert placed == {n: stage.rank for n, stage in enumerate(plan.stages)}
    edges = re.findall(r'stage_(\d) -> stage_(\d) \[label="(.*?)"\]', text)
    sizes = {
        (a, b): bytes_text(f.num_bytes)
        for f in plan.predicted.flows
        for a, b in f.edges
    }
    assert {(int(a), int(b)): size for a, b, size in edges} == sizes
    assert text.count("{") == text.count("}")


def test_quotes_in_names_of_modules_do_not_end_a_label() -> None:
    odd = replace(PLAN.stages[0], modules=('a"b\\c',))
    text = to_dot(replace(PLAN, stages=(odd, *PLAN.stages[1:])))
    assert r"\na\"b\\c\nF " in text


def test_the_command_writes_all_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(tmp_path / "plan.json")
    PLAN.to_json(plan)
    files = {
        option: tmp_path / f"picture{number}.svg"
        for number, option in enumerate(("--png", "--memory-png", "--scatter", "--dot"))
    }
    options = [word for name, path in files.items() for word in (name, str(path))]
    assert main(["plan", "show", plan, *options, "--top", "2"]) == 0
    assert all(path.stat().st_size for path in files.values())
    assert files["--dot"].read_text() == to_dot(PLAN)
    assert capsys.readouterr().out == f"{PLAN}\n\n{candidates_text(PLAN, 2)}\n"
