"""The command plans a model that a script makes."""

import subprocess
import sys
from pathlib import Path

import pytest

from torch_xla_pp.cli import main
from torch_xla_pp.planner import MeasuredCosts, PipelinePlan
from torch_xla_pp.work import WorkGraph

pytestmark = pytest.mark.xla

SCRIPT = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).relu())

def small():
    with torch.device("meta"):
        return Model(), (torch.zeros(2, 8),)

def trained():
    return Model(), (torch.randn(4, 8),), nn.functional.mse_loss, torch.zeros(4, 8)

def nothing():
    return Model()
"""


def test_a_scripts_model_is_traced_and_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, work, plan = (tmp_path / name for name in ("a.py", "work.json", "p.json"))
    script.write_text(SCRIPT)
    options = ["--rows", "8", "--ranks", "2", "--replicas", "1"]
    files = ["--save-work", str(work), "--output", str(plan)]
    assert main(["plan", f"{script}:small", *options, *files]) == 0
    printed = capsys.readouterr().out
    assert "2 ranks" in printed
    assert WorkGraph.from_json(work).num_ops == 3
    assert main(["plan", str(work), *options]) == 0
    assert capsys.readouterr().out == printed
    assert len(PipelinePlan.from_json(plan).stages) == 2


@pytest.mark.parametrize("name", ["nothing", "absent"])
def test_a_function_that_makes_no_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    script = tmp_path / "a.py"
    script.write_text(SCRIPT)
    assert main(["plan", f"{script}:{name}", "--rows", "8", "--ranks", "2"]) == 1
    assert "expected a function that returns a model" in capsys.readouterr().err


def test_works_are_measured_and_the_file_is_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, work, costs = (tmp_path / name for name in ("a.py", "w.json", "c.json"))
    script.write_text(SCRIPT)
    options = ["--rows", "8", "--ranks", "2", "--replicas", "1"]
    target = f"{script}:trained"
    files = ["--save-work", str(work), "--measure", str(costs)]
    run = subprocess.run(
        [sys.executable, "-m", "torch_xla_pp", "plan", target, *options, *files],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "costs: measured on cpu with 2, 4 rows" in run.stdout
    digests = {x.digest for x in WorkGraph.from_json(work).works}
    assert {x.digest for x in MeasuredCosts.from_json(costs).works} == digests
    assert main(["plan", str(work), *options, "--costs", str(costs)]) == 0
    assert capsys.readouterr().out == run.stdout


@pytest.mark.parametrize(
    ("target", "options", "fault"),
    [
        ("work.json", ["--measure", "c"], "expected script.py:function, got work.json"),
        ("a.py:small", ["--measure", "c"], "returns a loss function and its target"),
        ("a.py:small", ["--measure", "c", "--costs", "d"], "expected --costs or"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    options: list[str],
    fault: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(SCRIPT)
    assert main(["plan", target, "--rows", "8", "--ranks", "2", *options]) == 1
    assert fault in capsys.readouterr().err
