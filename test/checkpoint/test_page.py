"""The page on checkpoints is a script that runs."""

import re
from pathlib import Path

import pytest
from scripts import run_script
from torchrun import ROOT

from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds


def test_the_page_on_checkpoints_runs(worlds: Worlds, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "save-and-resume.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    script = tmp_path / "page.py"
    script.write_text(code.replace('"checkpoints', f'"{tmp_path}/checkpoints'))
    printed = run_script(worlds, script, ranks=2, devices=1)
    assert printed.count("step-5 at step 5") == 2
    assert "up.weight, up.bias, down.weight, down.bias" in printed
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "step-6",
        "step-7",
        "whole.pt",
    }
