"""Each kind of bad input to a plan gives one error, and exit code 1."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planner_models import gpt, mmt

from torch_xla_pp.cli import main
from torch_xla_pp.planner import DEVICES, MeasuredCosts, make_plan

pytestmark = pytest.mark.pure

OPTIONS = "plan work.json --rows 16 --ranks 2 --replicas 1"
Data = dict[str, Any]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with a model, another one, and a plan of the first."""
    monkeypatch.chdir(tmp_path)
    graph = gpt(2, 64, 32)
    graph.to_json("work.json")
    mmt(2).to_json("other.json")
    make_plan(graph, rows=16, ranks=2, replicas=(1,)).to_json("plan.json")
    DEVICES["cpu"].to_json("device.json")
    costs = MeasuredCosts(device="cpu", rows=(2,), action_s=0.0, works=())
    costs.to_json("costs.json")
    replace(costs, device="v5e", compiler="libtpu").to_json("compiled.json")


def refused(command: str, text: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(command.split()) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert re.search(text, printed.err), printed.err
    return printed.err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--memory 1MiB", r"at least .* on rank \d \(.* state, .* saved, .* temporary"),
        ("--microbatches 3", "got 3. The nearest that work are 1, 2, 4, 8; or take 15"),
        ("--ranks 7", "expected at most 6 ranks in a pipeline, .* got 7"),
        ("--schedules zbv --microbatches 2", "schedule of zbv takes, got 2. The near"),
        ("--replica-latency 5", "expected --replica-bandwidth with .* latency alone"),
        ("--device v9", "expected one of cpu, v5e, v5p, v6e, or a file .*write such a"),
        ("--sharding xp", "sharding: expected some of dp, fsdp, tp, got xp"),
        ("--schedules 2f2b", "schedules: expected some of 1f1b, .*, got 2f2b"),
        ("--optimizer lion", "optimizer: expected one of sgd, momentum, adamw, or byt"),
        ("--remat half", "remat: expected some of none, full, got half"),
        ("--reserve 150", "a reserve of at least 0 and below 1, got 1.5"),
        (
            "--devices-per-rank 2,1 --planner spp",
            "expected planner full .* for ranks that differ, got spp",
        ),
        ("--rank-sharding 1x1,tp", "rank sharding: expected the sizes .* got 'tp'"),
        (
            "--devices-per-rank 1,1,1",
            r"one for each of the ranks \(2\), got 3: 1, 1, 1",
        ),
        (
            "--device cpu,v5e,v5e",
            r"device: expected one, or one for each of the ranks \(2\), got 3: cpu, v",
        ),
        ("--device absent.json", "device: expected one of cpu"),
        ("--links absent.json", "No such file"),
        ("--fix stages=absent.json", "No such file"),
        ("--costs aot:absent.json", "a file of compiled works, got none at absent.j"),
        ("--costs aot:costs.json", "compiled costs in costs.json, .* measured on cpu"),
        ("--costs compiled.json", "measured costs in .*Write --costs aot:compiled.js"),
        ("--costs aot:compiled.json", "expected costs for cpu, .* compiled for v5e"),
        ("--rows 0", "rows: expected counts of at least 1, got 0"),
    ],
)
def test_a_faulty_option_gives_one_error(
    options: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(f"{OPTIONS} {options}", text, capsys)


def test_works_are_compiled_for_chips_alone(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan a.py:plan --rows 4 --ranks 2 --costs aot:new.json"
    refused(command, "expected --device of v4, v5e, v5p, v6e, got cpu", capsys)


def test_if_nothing_fits_each_remedy_has_its_own_figure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = refused(f"{OPTIONS} --memory 1MiB --remat none", "what helps:", capsys)
    remedies = message.split("what helps:\n")[1].strip().split("\n")
    assert len(remedies) == 4
    for remedy in remedies:
        assert re.fullmatch(
            r"  .*: (fits with [\d.]+ \w+, [\d.]+ m?s a step|still needs [\d.]+ \w+)",
            f"  {remedy.strip()}",
        )


def changed(path: str, change: Callable[[Data], object]) -> None:
    data = json.loads(Path(path).read_text())
    change(data)
    Path(path).write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.pop("action_s"), "action_s: expected this field, got none"),
        (lambda d: d.update(bytes_per_s=-1.0), "expected bytes_per_s above 0, got -1"),
        (
            lambda d: d.update(flops_per_s=float("nan")),
            "flops_per_s: expected a finite number, got nan",
        ),
        (lambda d: d.update(color="red"), "color: expected no such field. Known are n"),
        (lambda d: d.update(format="device"), "expected a record with that format"),
    ],
)
def test_a_faulty_device_file_is_told_by_key_and_value(
    change: Callable[[Data], object], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed("device.json", change)
    refused(f"{OPTIONS} --device device.json", text, capsys)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d["works"].pop(0), "value .*: expected known works, got embed"),
        (
            lambda d: d["values"][2].update(users=["embed"]),
            "expected users after .*, got embed. .* join works that are in a cycle",
        ),
        (lambda d: d.update(format="torch_xla_pp work 0"), "got 'torch_xla_pp work 0'"),
        (
            lambda d: d["works"][0].pop("forward"),
            r"works\[0\].forward: expected this f",
        ),
    ],
)
def test_faulty_work_is_told_by_its_place(
    change: Callable[[Data], object], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed("work.json", change)
    refused(OPTIONS, text, capsys)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda d: d["stages"][1]["ops"].append(d["stages"][0]["ops"][0]),
            "operation embed_op: expected in one stage, got it in 2",
        ),
        (
            lambda d: d["stages"][0]["ops"].pop(),
            "operations: expected the 6 of the model in stages, got 5",
        ),
        (
            lambda d: d["predicted"]["flows"].append(
                {**d["predicted"]["flows"][0], "producer": 1, "consumers": [0]}
            ),
            "expected values to go to higher stages, got them from 1 to 0.*in a circle",
        ),
        (lambda d: d.update(format="torch_xla_pp plan 0"), "got 'torch_xla_pp plan 0'"),
        (lambda d: d.update(color="red"), "color: expected no such field"),
        (lambda d: d.clear(), "expected a record with that format, got None"),
    ],
)
def test_a_file_that_is_no_sound_plan_is_refused(
    change: Callable[[Data], object], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed("plan.json", change)
    refused("plan show plan.json", text, capsys)
    refused("plan check plan.json --work work.json", text, capsys)


def test_a_plan_of_another_model_names_the_operation_that_it_lacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "model: expected digest .*; it lacks the planned operation embed_op"
    refused("plan check plan.json --work other.json", text, capsys)


def test_a_text_that_is_no_json_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plan.json").write_text("no json\n")
    refused("plan show plan.json", "plan 1: expected JSON, got a text that is", capsys)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (
            [["embed"], ["layers.9", "head"]],
            "got 'layers.9'. Its modules are embed, la",
        ),
        ([["head"], ["embed"]], "expected to go to higher stages, got it from stage 1"),
        ([["embed"], ["layers.0"], ["head"]], "that make the 3 given stages, got pip"),
    ],
)
def test_given_stages_that_contradict_say_which_part_and_what(
    names: list[list[str]], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("names.json").write_text(json.dumps(names))
    refused(f"{OPTIONS} --fix stages=names.json", text, capsys)


def test_given_stages_that_have_no_room_are_compared_with_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("names.json").write_text(json.dumps([["embed"], ["layers", "head"]]))
    message = refused(
        f"{OPTIONS} --fix stages=names.json --memory 1MiB", "the given stages:", capsys
    )
    assert "  other stages: still needs " in message
