"""The C++ code with threads has no races and no wrong accesses."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_matching_and_blocks_pass_the_sanitizers() -> None:
    run = subprocess.run(
        ["make", "--no-print-directory", "sanitize"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for name in ("engine_test", "blocks_test", "shared_test"):
        assert run.stdout.count(f"{name}: all is well") == 2
