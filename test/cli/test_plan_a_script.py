"""The command plans a model that a script makes."""

from pathlib import Path

import pytest

from torch_xla_pp.cli import main
from torch_xla_pp.planner import PipelinePlan
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
