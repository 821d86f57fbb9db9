"""A short form of `benchmarks/faults.py`: what survivors hear of a rank that is gone.

It is a program of its own, as its ranks are forked from a process without a client.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.worlds

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "faults.py"


@pytest.mark.parametrize(
    ("faults", "moments", "job"),
    [
        (["kill", "exit", "raise"], ["in a step", "between steps"], "2x1"),
        (["not reaped"], ["in eval"], "4x1"),
        (["stop"], ["between steps"], "2x1"),
    ],
)
def test_survivors_have_one_clear_error_in_time(
    faults: list[str], moments: list[str], job: str
) -> None:
    options = ["--faults", *faults, "--moments", *moments, "--jobs", job, "--json"]
    run = subprocess.run(
        [sys.executable, SCRIPT, *options],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) == len(faults) * len(moments)
    assert [row for row in rows if row["faults"]] == []
