"""What a user does for hours, in a loop and beside other work: nothing may die or hang.

    python benchmarks/stress.py
    python benchmarks/stress.py --cases eval 1F1B-32 --devices 2 --loads 4 --json

Every run is a job of its own: ranks of virtual devices, several of which have programs
with collectives (weights are split over half of the devices, batches over the other
half, or over all of them), and whose batches are on the devices when they are cut.
Columns, as the JSON names them:

case, devices: What is run, see `CASES`, on ranks of so many devices.
load: Busy loops that run beside it, on all cores.
runs: How often it was run.
aborts: Runs in which a rank's process ended by itself.
hangs: Runs that did not end in time.
errors: Runs that ended with an exception, or with numbers that are no numbers.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds

WIDTH, ROWS, LENGTH = 64, 8, 16
TWO_STAGES = ("Interleaved1F1B", "ZBVZeroBubble")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What every rank of a job does.

    Args:
        schedule: Name of torch's schedule.
        microbatches: Microbatches of a step.
        steps: Training steps.
        evals: Evaluations after them.
        ranks: Ranks of one pipeline.
        replicas: How many pipelines there are.
        is_optimized: Whether an optimizer runs, and collectives of the process group.
        is_recorded: Whether some steps are recorded.
        is_split: Whether the user has split the batch over all devices.
    """

    schedule: str = "1F1B"
    microbatches: int = 8
    steps: int = 0
    evals: int = 0
    ranks: int = 2
    replicas: int = 1
    is_optimized: bool = False
    is_recorded: bool = False
    is_split: bool = False


CASES = {
    "eval": Case(evals=300),
    "train": Case(steps=300),
    **{
        f"{schedule}-{count}": Case(schedule=schedule, microbatches=count, steps=20)
        for schedule in ("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble")
        for count in (8, 32)
    },
    "one rank": Case(schedule="Interleaved1F1B", steps=40, ranks=1),
    "optimizer": Case(steps=60, evals=20, is_optimized=True),
    "split batch": Case(steps=20, evals=20, microbatches=16, is_split=True),
    "replicas": Case(steps=30, evals=10, replicas=2, is_optimized=True),
    "profile_step": Case(steps=20, is_recorded=True),
}


class Part(nn.Module):
    """A stage with two products, whose weights are split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like `x`, `(B, L, WIDTH)`."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def run_case(case: Case, devices: int) -> list[float]:
    """Do what a case says, in every rank; return the last losses."""
    dist.init_process_group("xla_pp")
    names, shape = ("dp", "pp", "data", "model"), (devices // 2, 2)
    if case.is_split or devices == 1:
        shape = (devices, 1)
    mesh = xpp.init_device_mesh(
        "xla", (case.replicas, case.ranks, *shape), mesh_dim_names=names
    )
    stages = _stages(case, mesh)
    schedule_class = get_schedule_class(case.schedule)
    schedule = schedule_class(
        stages if case.schedule in TWO_STAGES else stages[0],
        case.microbatches,
        loss_fn=F.mse_loss,
    )
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters) if case.is_optimized else None
    x = _batch(case, mesh)
    first, last = (any(getattr(s, n) for s in stages) for n in ("is_first", "is_last"))
    losses: list[Tensor] = []

    def call(run: Any) -> None:
        losses.clear()
        args = (x,) if first else ()
        run(*args, **({"target": x, "losses": losses} if last else {}))

    for step in range(case.steps):
        if case.is_recorded and step % 5 == 4:
            with xpp.profile_step(schedule):
                call(schedule.step)
        else:
            call(schedule.step)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
            total = torch.ones((), device=xpp.device())
            dist.all_reduce(total)
    for _ in range(case.evals):
        call(schedule.eval)
    found = [loss.item() for loss in losses]
    dist.barrier()
    if not all(map(math.isfinite, found)):
        raise ValueError(f"expected losses that are numbers, got {found}")
    return found


def _stages(case: Case, mesh: Any) -> list[Any]:
    """Make this rank's stages: one, or two as the schedule places them."""
    rank, ranks = mesh.get_local_rank("pp"), case.ranks
    mine, count = [rank], ranks
    if case.schedule in TWO_STAGES:
        count = 2 * ranks
        is_v = case.schedule == "ZBVZeroBubble"
        mine.append(count - 1 - rank if is_v else rank + ranks)
    torch.manual_seed(0)
    parts = [Part() for _ in range(count)]
    return [
        xpp.PipelineStage(
            parts[index],
            index,
            count,
            xpp.device(),
            group=mesh.get_group("pp"),
            mesh=mesh["data", "model"],
            sharding={"up.weight": ("model", None), "down.weight": (None, "model")},
            replicas=mesh.get_group("dp") if case.replicas > 1 else None,
        )
        for index in mine
    ]


def _batch(case: Case, mesh: Any) -> Tensor:
    """Return a batch that is on the devices, whole or split over its rows."""
    x = torch.randn(ROWS * case.microbatches, LENGTH, WIDTH).to(xpp.device())
    if case.is_split:
        import torch_xla.distributed.spmd as xs

        xs.mark_sharding(x, mesh["data", "model"], ("data", None, None))
    return x


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep cores busy with so many processes."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def row_of(
    worlds: Worlds, name: str, devices: int, load: int, runs: int, timeout_s: float
) -> dict[str, Any]:
    """Run a case several times, and count how the runs ended."""
    # The workers import this file, so its functions must not be those of `__main__`.
    import stress

    case = stress.CASES[name]
    counts: Counter[str] = Counter()
    with busy_loops(load):
        for _ in range(runs):
            outcomes = worlds.run_outcomes(
                stress.run_case,
                ranks=case.ranks * case.replicas,
                devices=devices,
                args=(case, devices),
                timeout_s=timeout_s,
            )
            kinds = {outcome.error for outcome in outcomes} - {""}
            counts[_worst(kinds)] += 1
            for rank, outcome in enumerate(outcomes):
                if outcome.error:
                    print(
                        f"rank {rank}: {outcome.error}: {outcome.message}\n"
                        f"{outcome.traceback}",
                        file=sys.stderr,
                    )
    return {
        "case": name,
        "devices": devices,
        "load": load,
        "runs": runs,
        "aborts": counts["abort"],
        "hangs": counts["hang"],
        "errors": counts["error"],
    }


def _worst(kinds: set[str]) -> str:
    """Say how a run ended whose ranks ended with these errors."""
    if not kinds:
        return "well"
    if "Died" in kinds:
        return "abort"
    # Ranks that had to be killed because another one failed are no hang.
    return "hang" if kinds == {"Killed"} else "error"


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    return (
        f"{row['case']:18} {row['devices']} devices, load {row['load']}: "
        f"{row['runs']} runs, {row['aborts']} aborts, {row['hangs']} hangs, "
        f"{row['errors']} errors"
    )


def main() -> None:
    """Run the cells that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--loads", nargs="+", type=int, default=[0, 4])
    parser.add_argument("--runs", type=int, default=4, help="of each cell")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of a run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("TORCH_XLA_PP_TIMEOUT_S", "120")
    with Worlds() as worlds:
        for name in options.cases:
            for devices in options.devices:
                for load in options.loads:
                    row = row_of(
                        worlds, name, devices, load, options.runs, options.timeout
                    )
                    print(json.dumps(row) if options.json else line_of(row), flush=True)


if __name__ == "__main__":
    main()
