"""The command line prints, draws and refuses."""

import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from planner_models import gpt
from torchrun import ROOT

from torch_xla_pp.cli import main
from torch_xla_pp.schedule import Schedule, dag_1f1b, one_f_one_b, zb1p, zbv
from torch_xla_pp.simulate import Costs, Link, Network, simulate
from torch_xla_pp.timeline import Timeline, summarize

pytestmark = pytest.mark.pure


def test_it_starts_without_torch(tmp_path: Path) -> None:
    """Importing torch_xla takes seconds."""
    command = "schedule show 1f1b --ranks 2 --microbatches 3".split()
    found = subprocess.run(
        [sys.executable, "-m", "torch_xla_pp", *command],
        env={"PYTHONPROFILEIMPORTTIME": "1", "PYTHONPATH": ":".join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == f"{one_f_one_b(2, 3)}\n"
    assert "torch_xla_pp.cli" in found.stderr
    assert "| torch\n" not in found.stderr


def test_the_installed_command_is_there() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _, name = pyproject["project"]["scripts"]["torch-xla-pp"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_a_schedule_is_shown_written_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "zbv.csv", tmp_path / "zbv.svg"
    command = f"schedule show zbv --ranks 2 --microbatches 4 --csv {files[0]}"
    assert main([*command.split(), "--svg", str(files[1])]) == 0
    assert capsys.readouterr().out == f"{zbv(2, 4)}\n"
    assert Schedule.from_csv(files[0]) == zbv(2, 4)
    assert "<svg" in files[1].read_text()


@pytest.mark.parametrize(
    "name", ["ZB1P", "InterleavedZeroBubble", "ScheduleInterleavedZeroBubble"]
)
def test_names_of_upstreams_classes_are_known(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"schedule show {name} --ranks 2 --microbatches 4 --stages-per-rank 2"
    assert main(command.split()) == 0
    assert capsys.readouterr().out == f"{zb1p(2, 4, 2)}\n"


def test_a_schedule_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    assert main(["schedule", "check", str(file)]) == 0
    assert capsys.readouterr().out == "can run: ranks 2, stages 2, microbatches 1\n"
    file.write_text("0F0,0B0\n1B0,1F0\n")
    assert main(["schedule", "check", str(file)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: schedule: expected one that can run, got 1")
    assert "1B0 <--" in printed.err


def test_a_schedule_is_checked_against_a_graph(tmp_path: Path) -> None:
    edges = ((0, 1), (0, 2), (1, 3), (2, 3))
    file = tmp_path / "dag.csv"
    dag_1f1b(edges, {0: 0, 1: 0, 2: 1, 3: 1}, 4).to_csv(file)
    command = ["schedule", "check", str(file), "--edges"]
    assert main([*command, "0-1,0-2,1-3,2-3"]) == 0
    assert main([*command, "0-1,0-2,1-3,2-3", "--max-live", "1"]) == 1
    assert main([*command, "0-9"]) == 1


def test_a_step_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "step.json", tmp_path / "trace.json"]
    command = "simulate 1f1b --ranks 2 --microbatches 4 --forward 1,3 --bytes 2000000"
    command += f" --latency 10 --bandwidth 1 --output {files[0]} --trace {files[1]}"
    assert main(command.split()) == 0
    costs = Costs.uniform(2, input_s=1e-3, weight_s=1e-3, num_bytes=2_000_000)
    seconds = {**costs.seconds, (0, "F"): 1e-3, (1, "F"): 3e-3}
    network = Network(default=Link(latency_s=1e-5, bytes_per_s=1e9))
    expected = simulate(
        one_f_one_b(2, 4), Costs(seconds=seconds, flows=costs.flows), network
    )
    assert capsys.readouterr().out == f"{summarize(expected)}\n"
    assert Timeline.from_json(files[0]) == expected
    assert json.loads(files[1].read_text())["traceEvents"]


def test_recorded_steps_are_shown_merged_and_used_as_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = simulate(one_f_one_b(2, 4), Costs.uniform(2, num_bytes=8))
    whole, trace = tmp_path / "step.json", tmp_path / "trace.json"
    step.to_json(whole)
    assert main(["trace", "show", str(whole)]) == 0
    shown = capsys.readouterr().out
    command = ["simulate", "1f1b", "--ranks", "2", "--microbatches", "4", "--profile"]
    assert main([*command, str(whole)]) == 0
    average = f"{step.step_s * 1e3:.2f} ms on average, as actions vary\n"
    assert capsys.readouterr().out == shown + average

    parts = []
    for rank in range(2):
        parts.append(str(tmp_path / f"rank{rank}.json"))
        Timeline(num_ranks=2, spans=step.of_rank(rank)).to_json(parts[-1])
    merge = ["trace", "merge", "--output", str(trace)]
    assert main([*merge, "--parts", *parts]) == 0
    assert str(trace) in capsys.readouterr().out
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0}
    assert main([*merge, str(whole), *parts]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2}
    assert main([*merge, "--parts", str(whole), *parts]) == 1


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("schedule show 2f2b", "expected one of gpipe, 1f1b, .* got '2f2b'"),
        ("schedule show gpipe", "got no --ranks and no --microbatches"),
        ("schedule show zbv --ranks 2 --microbatches 3 --stages-per-rank 2", "fixed"),
        ("schedule show dualpipev --ranks 4 --microbatches 3", "the 8 stages, got 3"),
        ("simulate 1f1b --ranks 2 --microbatches 2 --forward 1,2,3", "got 3"),
        ("simulate 1f1b --ranks 2 --microbatches 2 --latency -1", "link: expected"),
        ("trace show no_file.json", "No such file"),
    ],
)
def test_faulty_inputs_give_one_error(
    command: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert re.search(fault, printed.err)


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("schedule show gpipe --ranks 0", "expected a count from 1, got '0'"),
        ("simulate gpipe --forward a", "expected milliseconds such as"),
        ("schedule check a.csv --edges 0-1-2", "expected pairs of stages"),
        ("", "the following arguments are required: COMMAND"),
    ],
)
def test_faulty_options_give_the_usage(
    command: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(command.split())
    assert stop.value.code == 2
    assert fault in capsys.readouterr().err


def test_help_has_examples_that_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    one_f_one_b(2, 4).to_csv("mine.csv")
    step = simulate(one_f_one_b(2, 4), Costs.uniform(2))
    for name in ("step", "measured", "predicted"):
        step.to_json(f"{name}.json")
    gpt(8, 64, 32).to_json("work.json")
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    examples = [line for line in lines if line.startswith("  python -m torch_xla_pp ")]
    assert len(examples) >= 6
    for example in examples:
        assert main(example.split()[3:]) == 0, example
