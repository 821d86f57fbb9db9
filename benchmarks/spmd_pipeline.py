"""Pipelines over ranks, inside one SPMD program, and in JAX, side by side.

    python benchmarks/spmd_pipeline.py
    python benchmarks/spmd_pipeline.py --size large --microbatches 4 8 16 --json

Equal transformer blocks without embedding and head, a square loss, SGD, two devices.
`ranks`: two ranks of one device under torch's schedules. `spmd`: one process with two
devices, `xpp.spmd_pipeline` as its only stage, GPipe's order or circular with two
repeats. `jax`: the same in JAX (`shard_map` and `ppermute`; `jax_pipeline.py`), if
`--jax` has a Python that has it, see `stage_time.py`. All have the same two cores. Each
side runs in processes of its own, so they take turns as a whole: medians over turns, of
the median step of each, are printed with their quartiles, and the ratio to the first
row of the same number of microbatches, likewise of turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import gpt
import sides
import torch
import torch.distributed as dist
from spread import medians_of, ratios, text_of
from torch import Tensor, nn
from torch.nn import functional as F

NUM_DEVICES = 2
TURNS = 5
STEPS = 5
WARM_UP = 3
REPEATS = {"spmd GPipe": 1, "spmd circular": 2}
RANKS = {"ranks 1F1B": "1F1B", "ranks GPipe": "GPipe"}
JAX = {"jax GPipe": 1, "jax circular": 2}


def batch(microbatches: int, size: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, each `(ROWS * microbatches, length, width)`."""
    torch.manual_seed(7)
    shape = (gpt.ROWS * microbatches, size["length"], size["width"])
    return torch.randn(2, *shape).unbind()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of squares."""
    return F.mse_loss(output, target.to(output.device))


def time_ranks(schedule: str, microbatches: int, size: dict[str, int]) -> list[float]:
    """Time steps of a pipeline over ranks, in seconds."""
    sides.join(sorted(os.sched_getaffinity(0)))
    import torch_xla_pp as xpp

    rank = dist.get_rank()
    torch.manual_seed(rank)
    blocks = [gpt.Block(size["width"], size["heads"]) for _ in range(size["layers"])]
    part = nn.Sequential(*blocks[: size["layers"] // NUM_DEVICES])
    stage = xpp.PipelineStage(part, rank, NUM_DEVICES, xpp.device())
    return time_steps(stage, schedule, microbatches, batch(microbatches, size))


def time_spmd(repeats: int, microbatches: int, size: dict[str, int]) -> list[float]:
    """Time steps of a pipeline inside one program, in seconds."""
    import torch_xla_pp as xpp

    dist.init_process_group("xla_pp")
    mesh = xpp.init_device_mesh("xla", (1, NUM_DEVICES), mesh_dim_names=("pp", "stage"))
    blocks = [gpt.Block(size["width"], size["heads"]) for _ in range(size["layers"])]
    piped = xpp.spmd_pipeline(
        blocks,
        num_stages=NUM_DEVICES,
        num_microbatches=microbatches,
        num_repeats=repeats,
    )
    stage = xpp.PipelineStage(
        piped,
        0,
        1,
        xpp.device(),
        group=mesh.get_group("pp"),
        mesh=mesh["stage"],
        sharding=piped.axis_rules("stage"),
        batch_axis=None,
    )
    return time_steps(stage, "GPipe", 1, batch(microbatches, size))


def time_steps(
    stage: Any, schedule: str, microbatches: int, data: tuple[Tensor, Tensor]
) -> list[float]:
    """Train and return the seconds of each step after the first ones."""
    import torch.distributed as dist
    from torch.distributed.pipelining.schedules import get_schedule_class

    from torch_xla_pp import xla_compat

    runner = get_schedule_class(schedule)(stage, microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)
    inputs = data[:1] if stage.is_first else ()
    target = data[1] if stage.is_last else None
    seconds = []
    for _ in range(WARM_UP + STEPS):
        dist.barrier()
        start = time.perf_counter()
        runner.step(*inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()
        xla_compat.wait_device()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


def time_jax(
    python: str, repeats: int, microbatches: int, size_name: str
) -> list[float]:
    """Time steps in JAX, in seconds; raise `RuntimeError` if it cannot run."""
    script = Path(__file__).with_name("jax_pipeline.py")
    size = json.dumps({**gpt.SIZES[size_name], "rows": gpt.ROWS})
    command = [python, str(script), size, str(microbatches), str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def turn(side: str, microbatches: int, size_name: str, jax: str) -> list[float]:
    """Run one side in fresh processes."""
    # The workers import this file, so its functions must not be those of `__main__`.
    import spmd_pipeline

    from torch_xla_pp.testing import Worlds

    if side in JAX:
        return time_jax(jax, JAX[side], microbatches, size_name)
    size = gpt.SIZES[size_name]
    with Worlds() as worlds:
        if side in RANKS:
            args: Any = (RANKS[side], microbatches, size)
            found = worlds.run(
                spmd_pipeline.time_ranks, ranks=NUM_DEVICES, args=args, timeout_s=1800
            )
        else:
            args = (REPEATS[side], microbatches, size)
            found = worlds.run(
                spmd_pipeline.time_spmd,
                ranks=1,
                devices=NUM_DEVICES,
                args=args,
                timeout_s=1800,
            )
    first: list[float] = found[0]
    return first


def rows_of(microbatches: int, size_name: str, jax: str) -> list[dict[str, Any]]:
    """Let the sides take turns and return a row for each."""
    names = [*RANKS, *REPEATS, *(JAX if jax else ())]
    seconds: dict[str, list[float]] = {side: [] for side in names}
    errors: dict[str, str] = {}
    for _ in range(TURNS):
        for side in seconds:
            try:
                steps = turn(side, microbatches, size_name, jax)
                seconds[side].append(statistics.median(steps))
            except RuntimeError as error:
                errors[side] = str(error)
    base = names[0]
    rows = []
    for side, found in seconds.items():
        row = {"side": side, "model": size_name, "microbatches": microbatches}
        if side in errors:
            rows.append(row | {"error": errors[side]})
            continue
        figures = {"step_s": found}
        if base not in errors:
            figures["ratio"] = ratios(found, seconds[base])
        rows.append(row | medians_of(figures))
    return rows


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    start = f"{row['model']} M={row['microbatches']:<3} {row['side']:14}"
    if "error" in row:
        return f"{start} did not run: {row['error']}"
    ratio = f"  ratio {text_of(row, 'ratio')}" if "ratio" in row else ""
    return f"{start} {text_of(row, 'step_s', '.3f')} s{ratio}"


def main() -> None:
    """Run the cells that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=gpt.SIZES, default="small")
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8])
    parser.add_argument(
        "--jax", metavar="PYTHON", default="", help="a Python that has JAX"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for microbatches in options.microbatches:
        for row in rows_of(microbatches, options.size, options.jax):
            print(json.dumps(row) if options.json else line_of(row), flush=True)


if __name__ == "__main__":
    main()
