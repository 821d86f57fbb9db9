"""Plans from the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from planner_models import gpt, mmt

from torch_xla_pp.cli import main
from torch_xla_pp.planner import PipelinePlan

pytestmark = pytest.mark.pure

OPTIONS = ["--rows", "16", "--ranks", "2", "--device", "v5p"]


@pytest.fixture
def work(tmp_path: Path) -> str:
    path = tmp_path / "work.json"
    gpt(2, 64, 32).to_json(path)
    return str(path)


def test_a_plan_is_made_shown_and_checked(
    work: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    files = ["--output", str(plan), "--trace", str(trace)]
    assert main(["plan", work, *OPTIONS, *files]) == 0
    made = capsys.readouterr().out
    assert main(["plan", "show", str(plan)]) == 0
    assert capsys.readouterr().out == made
    assert main(["plan", "check", str(plan), "--work", work]) == 0
    assert "sound" in capsys.readouterr().out
    assert json.loads(trace.read_text())["traceEvents"]
    assert PipelinePlan.from_json(plan).batch.rows == 16


def test_two_plans_are_compared(
    work: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = str(tmp_path / "one.json"), str(tmp_path / "two.json")
    assert main(["plan", work, *OPTIONS, "--replicas", "1", "--output", one]) == 0
    assert main(["plan", work, *OPTIONS, "--replicas", "2", "--output", two]) == 0
    capsys.readouterr()
    assert main(["plan", "show", one, "--against", two]) == 0
    assert "replicas" in capsys.readouterr().out


def test_rules_say_which_parameters_are_split(work: str, tmp_path: Path) -> None:
    """The file is one of `AxisRules.to_json`, and the command needs no torch."""
    rules, path = tmp_path / "rules.json", tmp_path / "plan.json"
    rules.write_text(json.dumps({"parameters": {"embed.0": ["vocab", "embed"]}}))
    pair = ["--devices-per-rank", "2", "--sharding", "tp", "--replicas", "1"]
    held = {}
    for name, given in (("shapes", []), ("rules", ["--rules", str(rules)])):
        options = [*OPTIONS, *pair, *given, "--output", str(path)]
        assert main(["plan", work, *options]) == 0
        plan = PipelinePlan.from_json(path)
        held[name] = sum(rank.bytes.parameters for rank in plan.predicted.ranks)
    parameters = plan.model.parameter_bytes
    table = 2 * 50_304 * 64  # bfloat16
    assert held["rules"] == parameters - table // 2
    assert held["shapes"] < held["rules"]


def test_replicas_may_have_a_link_of_their_own(
    work: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    link = ["--replica-bandwidth", "0.001", "--replica-latency", "20"]
    files = ["--replicas", "2", "--output", str(path)]
    assert main(["plan", work, *OPTIONS, *link, *files]) == 0
    printed = capsys.readouterr().out
    assert "advice dp over replicas (2 devices), stage 0: " in printed
    found = PipelinePlan.from_json(path).costs.replica_link
    assert found is not None
    assert (found.latency_s, found.bytes_per_s) == (pytest.approx(2e-5), 1e6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--device", "v9"], "device: expected one of cpu"),
        (["--schedules", "2f2b"], "schedules: expected some of"),
        (["--memory", "1MiB"], "expected a plan that fits"),
        (["--optimizer", "lion"], "optimizer: expected one of"),
        (["--ranks", "64", "--replicas", "1"], "at most 6 ranks in a pipeline"),
    ],
)
def test_what_is_at_fault_is_told(
    work: str, options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", work, *OPTIONS, *options]) == 1
    assert text in capsys.readouterr().err


def test_a_plan_of_another_model_is_refused(
    work: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, other = str(tmp_path / "plan.json"), str(tmp_path / "other.json")
    mmt(2).to_json(other)
    assert main(["plan", work, *OPTIONS, "--output", plan]) == 0
    assert main(["plan", "check", plan, "--work", other]) == 1
    assert "model: expected digest" in capsys.readouterr().err


def test_help_of_a_plan_has_examples_that_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    gpt(8, 64, 32).to_json("work.json")
    for name in ("plan.json", "other.json"):
        assert main(["plan", "work.json", *OPTIONS, "--output", name]) == 0
    capsys.readouterr()
    printed = []
    for words in (["plan", "--help"], ["plan", "make", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 0
        printed.append(capsys.readouterr().out)
    # All options are those of `plan make`.
    examples = printed[1].split("examples:")[1]
    assert printed[0].endswith(examples) and "--memory-png" in printed[1]
    lines = printed[1].splitlines()
    examples = [line for line in lines if line.startswith("  python -m torch_xla_pp ")]
    assert len(examples) >= 4
    for example in examples:
        assert main(example.split()[3:]) == 0, example


@pytest.mark.parametrize("size", ["lots", "12XB", "-1GiB"])
def test_a_size_that_is_none_is_refused(work: str, size: str) -> None:
    with pytest.raises(SystemExit):
        main(["plan", work, *OPTIONS, f"--memory={size}"])


def test_the_command_does_without_torch(work: str) -> None:
    script = (
        "import sys\nfrom torch_xla_pp.cli import main\n"
        f"assert main({['plan', work, *OPTIONS]!r}) == 0\n"
        "assert not {'torch', 'torch_xla', 'jax'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
