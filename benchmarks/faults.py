"""What the other ranks hear of a rank that dies, stops, leaves or raises, and how soon.

    python benchmarks/faults.py
    python benchmarks/faults.py --faults kill exit --moments "in eval" --jobs 2x1 --json

Every fault is a job of real processes, one for each rank. One rank has the fault; every
other one must end with one clear error that names it, within `LIMIT_S` seconds (of a
rank that is stopped: within the job's limit, `TIMEOUT_S`, and `LIMIT_S`). Columns, as
the JSON names them:

fault: "kill" (SIGKILL), "not reaped" (the same, and nobody collects its exit code),
    "stop" (SIGSTOP), "exit" (`sys.exit(0)`), "raise" (an exception nobody catches).
moment: When it happens, see `MOMENTS`.
job: Ranks and devices of each, or "replicas": two pipelines of two ranks.
seconds: For each survivor, from the fault to its error.
faults: What is wrong: survivors without an error, or too late, or with an error that
    names no rank, stage and step; and shared memory or files that are left.
"""

import argparse
import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

os.environ |= {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}

import torch
import torch._dynamo  # noqa: F401  (imported when a model is first traced)
import torch._functorch.aot_autograd  # noqa: F401
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.local_job import free_port

FAULTS = ("kill", "not reaped", "stop", "exit", "raise")
MOMENTS = (
    "before the first step",
    "in a step",
    "between steps",
    "in eval",
    "in a pause",
    "in optimizer.step",
)
JOBS = {"2x1": (2, 1, 1), "2x2": (2, 1, 2), "4x1": (4, 1, 1), "replicas": (2, 2, 1)}
LIMIT_S = 5.0
TIMEOUT_S = 15.0
FAULT_STEP, PAUSE_S = 3, 3.0
MOST_S = 120.0


def run_rank(fault: str, moment: str, job: str, victim: int) -> None:
    """Train and evaluate for ever, as a rank of the job; the victim has the fault."""
    ranks, replicas, devices = JOBS[job]
    dist.init_process_group("xla_pp")
    is_victim = dist.get_rank() == victim
    mesh = xpp.init_device_mesh(
        "xla", (replicas, ranks, devices), mesh_dim_names=("dp", "pp", "data")
    )

    def here(where: str, step: int) -> None:
        if not is_victim or where != moment or step not in (0, FAULT_STEP):
            return
        Path(os.environ["FAULT_FILE"]).write_text(repr(time.time()))
        if fault in ("kill", "not reaped"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "exit":
            sys.exit(0)
        raise OverflowError("a fault of the user's")

    rank = mesh.get_local_rank("pp")
    stage = xpp.PipelineStage(
        nn.Linear(8, 8),
        rank,
        ranks,
        xpp.device(),
        group=mesh.get_group("pp"),
        mesh=mesh["data"],
        replicas=mesh.get_group("dp") if replicas > 1 else None,
    )
    schedule = Schedule1F1B(stage, 4, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(stage.submod.parameters())
    forward = stage.forward_one_chunk

    def forward_with_fault(chunk: int, *args: Any) -> Any:
        where = "in a step" if stage.has_backward else "in eval"
        here(where, step) if chunk == 2 else None
        return forward(chunk, *args)

    stage.forward_one_chunk = forward_with_fault
    optimizer.register_step_post_hook(lambda *_: here("in optimizer.step", step))
    x = torch.ones(16, 8)
    step = 0
    here("before the first step", 0)
    while True:
        step += 1
        args, target = ((x,) if rank == 0 else ()), (x if rank == ranks - 1 else None)
        for run in (schedule.step, schedule.eval):
            losses: list[torch.Tensor] = []
            given = {} if target is None else {"target": target, "losses": losses}
            run(*args, **given)
        optimizer.step()
        optimizer.zero_grad()
        here("between steps", step)
        if step == FAULT_STEP and moment == "in a pause":
            here("in a pause", step)
            time.sleep(PAUSE_S)


class Rank:
    """A process of a job, forked from this one, which has imported all that is needed.

    Args:
        environment: Variables of its own.
        output: Where it prints.
        run: What it does.
    """

    def __init__(
        self, environment: dict[str, str], output: Path, run: Callable[[], None]
    ) -> None:
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.update(environment)
            with output.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            _end_as_a_program(run)

    def has_ended(self) -> bool:
        """Look, and collect the exit code."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def kill(self) -> None:
        """End it and collect its exit code."""
        if not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _end_as_a_program(run: Callable[[], None]) -> NoReturn:
    """Run something and end this process as the interpreter ends a program."""
    code = 0
    try:
        run()
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    except BaseException as error:
        Path(os.environ["ENDED_FILE"]).write_text(repr(time.time()))
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def result_of(fault: str, moment: str, job: str, victim: int) -> dict[str, Any]:
    """Run one job and say what its survivors heard."""
    ranks, replicas, devices = JOBS[job]
    before, shared = _files(), set[int]()
    wrong: list[str] = []
    seconds: list[float] = []
    folder = Path(tempfile.mkdtemp())
    run = functools.partial(run_rank, fault, moment, job, victim)
    processes = _start(folder, ranks * replicas, devices, run)
    survivors = {r: p for r, p in enumerate(processes) if r != victim}
    try:
        end_s = time.monotonic() + MOST_S
        while time.monotonic() < end_s:
            for process in processes:
                shared |= _shared_by(process.pid)
            if fault != "not reaped":
                processes[victim].has_ended()
            if all([process.has_ended() for process in survivors.values()]):
                break
            time.sleep(0.02)
        for rank, process in survivors.items():
            text = (folder / f"rank{rank}").read_text()
            wrong += _faults_of(rank, process.code, text, fault, len(processes))
        if not (folder / "fault").exists():
            wrong.append("the fault did not happen")
        else:
            since_s = float((folder / "fault").read_text())
            ends = [folder / f"ended{rank}" for rank in survivors]
            seconds = [float(e.read_text()) - since_s for e in ends if e.exists()]
    finally:
        for process in processes:
            process.kill()
        shutil.rmtree(folder)
    allowed_s = LIMIT_S + (TIMEOUT_S if fault == "stop" else 0.0)
    allowed_s += PAUSE_S if moment == "in a pause" else 0.0
    wrong += [f"a survivor took {s:.1f} s" for s in seconds if s > allowed_s]
    memory = {path for path in Path("/dev/shm").glob("*") if _number(path) in shared}
    wrong += [f"left: {path}" for path in sorted(memory | (_files() - before))]
    return {
        "fault": fault,
        "moment": moment,
        "job": job,
        "seconds": [round(s, 2) for s in seconds],
        "faults": wrong,
    }


def _start(
    folder: Path, count: int, devices: int, run: Callable[[], None]
) -> list[Rank]:
    """Start the ranks of a job."""
    port = free_port()
    processes = []
    for rank in range(count):
        own = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "CPU_NUM_DEVICES": devices,
            "TORCH_XLA_PP_TIMEOUT_S": TIMEOUT_S,
            "FAULT_FILE": folder / "fault",
            "ENDED_FILE": folder / f"ended{rank}",
        }
        texts = {name: str(value) for name, value in own.items()}
        processes.append(Rank(texts, folder / f"rank{rank}", run))
    return processes


def _faults_of(
    rank: int, code: int | None, text: str, fault: str, count: int
) -> list[str]:
    """Return what is wrong with how a survivor ended, and what it printed."""
    text = re.sub(r"^\[rank\d+\]: ?", "", text, flags=re.MULTILINE)
    if code is None:
        return [f"rank {rank} still runs"]
    if code != 1:
        return [f"rank {rank} ended with {code}: {text[-500:]}"]
    errors = re.findall(r"^[\w.]*(?:Error|Timeout): .*$", text, re.MULTILINE)
    if not errors:
        return [f"rank {rank} printed no error: {text[-500:]}"]
    last = text[text.rindex(errors[-1]) :]
    if fault == "raise" and "a fault of the user's" not in last:
        return [f"rank {rank} did not learn of the exception: {last[:500]}"]
    # Errors name ranks of the pipeline, or of the replicas.
    others = [rf"rank {other}\b" for other in range(count)]
    if not re.search("|".join(others), last):
        return [f"rank {rank}: no rank is named: {last[:500]}"]
    if not re.search(r"\bstage \d", last) or not re.search(r"\bstep\b", last):
        return [f"rank {rank}: no stage or step is named: {last[:500]}"]
    return []


def _files() -> set[Path]:
    """Return the files of UCX and of this package that are there."""
    names = ("ucx*", "xpp*", "torch_xla_pp*")
    return {path for name in names for path in Path("/tmp").glob(name)}


def _shared_by(process: int) -> set[int]:
    """Return the numbers of the shared memory that a process has.

    Names do not tell: glibc renames a semaphore after it was mapped, and other jobs of
    the machine have some, too.
    """
    try:
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split()[4]) for line in lines if "/dev/shm/" in line}


def _number(path: Path) -> int:
    """Return the number of a file, zero if it is gone."""
    with contextlib.suppress(OSError):
        return path.stat().st_ino
    return 0


def main() -> None:
    """Run the faults that the command line asks for, and print percentiles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=MOMENTS)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seconds: list[float] = []
    num_wrong = number = 0
    for fault in options.faults:
        for moment in options.moments:
            for job in options.jobs:
                number += 1
                ranks, replicas, _ = JOBS[job]
                row = result_of(fault, moment, job, number % (ranks * replicas))
                num_wrong += bool(row["faults"])
                if fault != "stop":
                    seconds += row["seconds"]
                print(json.dumps(row) if options.json else line_of(row), flush=True)
    print(f"{number} faults, {num_wrong} with something wrong", file=sys.stderr)
    if len(seconds) > 1:
        marks = statistics.quantiles(seconds, n=100, method="inclusive")
        print(
            f"seconds to the error, without stops: median {marks[49]:.2f}, "
            f"90 % {marks[89]:.2f}, 99 % {marks[98]:.2f}, most {max(seconds):.2f}",
            file=sys.stderr,
        )


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    seconds = ", ".join(f"{s:.1f}" for s in row["seconds"])
    wrong = "; ".join(row["faults"]) or "well"
    return (
        f"{row['fault']:10} {row['moment']:22} {row['job']:8} {seconds:18} s: {wrong}"
    )


if __name__ == "__main__":
    main()
