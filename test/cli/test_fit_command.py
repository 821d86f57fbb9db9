"""The command that compiles for devices that are not here refuses, or says how."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torchrun import ROOT

from torch_xla_pp.accelerators import CompilerLibrary
from torch_xla_pp.cli import main
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.fitting import Fit

TARGET = """
import torch
from torch import nn
from torch.nn.functional import mse_loss

def plan():
    with torch.device("meta"):
        layers = [nn.Linear(256, 256) for _ in range(4)]
        x = torch.zeros(8, 256)
    return nn.Sequential(*layers), (x,), mse_loss, x
"""


def has_library() -> bool:
    try:
        CompilerLibrary.find()
    except PipelineError:
        return False
    return True


@pytest.mark.pure
def test_without_a_compiler_it_says_how_to_get_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "none.so"))
    command = "fit a.py:plan --topology v5e:2x2 --ranks 2 --microbatches 4"
    assert main(command.split()) == 1
    assert "Install it beside this package" in capsys.readouterr().err


@pytest.mark.pure
@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ("--topology v1:2", "topology: expected one of v4, v5e, v5p, v6e"),
        ("--topology v5e:2x2 --schedule none", "schedule: expected one of gpipe"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(
    options: str,
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    library = tmp_path / "libtpu.so"
    library.write_text("")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    assert main(["fit", "a.py:plan", *options.split()]) == 1
    assert fault in capsys.readouterr().err


@pytest.mark.pure
@pytest.mark.parametrize("given", ["", "a.py:plan --dump here"])
def test_a_script_or_a_dump_is_needed(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"fit {given} --topology v5e:2x2".split()) == 1
    assert "expected script.py:function or --dump, got" in capsys.readouterr().err


@pytest.mark.pure
def test_a_mesh_is_given_by_names_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("fit a.py:plan --topology v5e:2x2 --mesh 2x2".split())
    assert "expected axes and sizes such as data=2,model=2" in capsys.readouterr().err


@pytest.mark.xla
@pytest.mark.skipif(not has_library(), reason="libtpu is not installed")
def test_a_model_without_marks_is_cut_and_compiled(tmp_path: Path) -> None:
    script, result = tmp_path / "model.py", tmp_path / "fit.json"
    script.write_text(TARGET)
    command = "--topology v5e:2x1 --schedule 1f1b --ranks 2 --microbatches 4".split()
    done = subprocess.run(
        [sys.executable, "-m", "torch_xla_pp", "fit", f"{script}:plan", *command]
        + ["--output", str(result)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = Fit.from_json(result)
    assert found.fits and len(found.stages) == 2
    assert done.stdout == f"{found}\n"
