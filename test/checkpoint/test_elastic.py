"""A job whose ranks are killed ends as one that nobody has touched."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchrun import ROOT

from checkpoint.test_any_to_any import assert_same
from torch_xla_pp.checkpoint import latest

pytestmark = [pytest.mark.worlds, pytest.mark.timeout(1200)]

SCRIPT = ROOT / "examples" / "train_resume.py"
STEPS = 24


class Job:
    """A torchrun, and what its ranks leave behind."""

    def __init__(self, folder: Path, *, ranks: int = 2, restarts: int = 3) -> None:
        self.folder = folder
        self.pids: set[int] = set()
        self.segments: set[str] = set()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        command += [str(SCRIPT), "--folder", str(folder), "--steps", str(STEPS)]
        command += ["--every", "3"]
        env = os.environ | {"CPU_NUM_DEVICES": "1", "PJRT_DEVICE": "CPU"}
        self.process = subprocess.Popen(
            command,
            env=env,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def workers(self) -> list[int]:
        """Return the ranks' processes, and note what they share."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        found = [int(pid) for pid in path.read_text().split()]
        for pid in found:
            maps = Path(f"/proc/{pid}/maps")
            text = maps.read_text() if maps.exists() else ""
            self.segments |= set(re.findall(r"(/dev/shm/\S+)", text))
        self.pids |= set(found)
        return found

    def wait_for(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + 400
        while not condition():
            assert time.monotonic() < limit, self.stop()
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.001)

    def stop(self) -> str:
        self.process.terminate()
        return self.end()

    def end(self) -> str:
        """Wait for the end; return what was printed."""
        try:
            output, _ = self.process.communicate(timeout=500)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            output, _ = self.process.communicate(timeout=60)
            raise AssertionError(output) from None
        left = [pid for pid in self.pids if Path(f"/proc/{pid}").exists()]
        assert not left, left
        segments = [name for name in self.segments if Path(name).exists()]
        assert not segments, segments
        return output

    def losses(self) -> dict[int, float]:
        """Return step → loss; a step that was done again had the same."""
        file = self.folder / "losses.txt"
        found: dict[int, float] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            step, loss = line.split()
            assert found.setdefault(int(step), float(loss)) == float(loss)
        return found

    def values(self) -> dict[str, Tensor]:
        """Return weights and what the optimizer has kept, by name."""
        last, file = latest(self.folder), self.folder / "whole.pt"
        assert last is not None and last.name == f"step-{STEPS}"
        dcp_to_torch_save(last, file)
        saved = torch.load(file, weights_only=False)
        kept = saved["optim"]["state"].items()
        slots = {f"{n}:{k}": v for n, own in kept for k, v in own.items()}
        return {**saved["model"], **slots}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = Job(tmp_path_factory.mktemp("untouched"))
    output = job.end()
    assert job.process.returncode == 0, output
    assert f"done at step {STEPS}, loss " in output
    return job


@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_rank_changes_nothing(
    untouched: Job, tmp_path: Path, seed: int
) -> None:
    """Whenever it is killed; with an odd seed while a checkpoint is written."""
    chosen = random.Random(seed)
    job = Job(tmp_path)
    after = chosen.randrange(3, STEPS - 6)
    job.wait_for(lambda: len(job.losses()) >= after)
    if seed % 2:
        job.wait_for(lambda: any(tmp_path.glob(".*.partial")))
    else:
        time.sleep(chosen.random() * 0.2)
    os.kill(chosen.choice(job.workers()), signal.SIGKILL)
    output = job.end()
    assert job.process.returncode == 0, output
    assert job.losses() == untouched.losses()
    assert_same(job.values(), untouched.values())
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2


@pytest.mark.parametrize("whom", ["rank", "torchrun"])
def test_a_job_that_is_asked_to_end_saves_and_goes_on_with_other_ranks(
    untouched: Job, tmp_path: Path, whom: str
) -> None:
    job = Job(tmp_path, restarts=0)
    job.wait_for(lambda: len(job.losses()) >= 4)
    workers = job.workers()
    os.kill(workers[0] if whom == "rank" else job.process.pid, signal.SIGTERM)
    output = job.end()
    assert job.process.returncode != 0
    if whom == "rank":
        assert set(re.findall(r"exitcode\s*: (-?\d+)", output)) == {"75"}, output
    last = max(job.losses())
    assert latest(tmp_path) == tmp_path / f"step-{last}"
    assert 4 <= last < STEPS

    job = Job(tmp_path, ranks=1 if whom == "rank" else 4)
    output = job.end()
    assert job.process.returncode == 0, output
    expected = untouched.losses()
    assert job.losses().keys() == expected.keys()
    for step, loss in job.losses().items():
        assert loss == pytest.approx(expected[step], rel=1e-4)
        assert step > last or loss == expected[step]
