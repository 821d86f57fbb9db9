"""The C++ code that matches messages has no races and no wrong accesses."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_the_matching_passes_the_sanitizers() -> None:
    run = subprocess.run(
        ["make", "--no-print-directory", "sanitize"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("engine_test: all is well") == 2
