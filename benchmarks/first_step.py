"""Where the time goes until the first step is done, by number of layers.

    python benchmarks/first_step.py --layers 4 12 24 48 --json
    python benchmarks/first_step.py --size small --layers 8
    python benchmarks/first_step.py --kinds manual --layers 48 --stages 1 2 4 8
    python benchmarks/first_step.py --layers 48 --rounds 1 --profile /tmp/first

The GPT of `gpt.py` with more layers, on two ranks of one local device each, rank r with
all its threads on core r; 1F1B with two microbatches, interleaved where a rank has
several stages, which are equal but for the first and the last one. Each cell is in
fresh processes that have imported all but the tracer and have started XLA, several
times. A traced model is built without memory, and its stages make their own parameters;
manual stages are built as they are. A row for each rank; columns, as the JSON names
them, all of which are medians:

kind: "traced" by `xpp.pipeline`, or "manual" stages.
stages: Stages of each rank.
total_s, total_cpu_s: From before the model is built until the devices have run the
    first step, and the processor time of all threads.
phases: Phase → its time (wall_s), the processor time of the main thread (thread_s) and
    of all threads (process_s), and how often it was begun (num_blocks):
    trace: torch.export of the whole model, on every rank.
    split: The cut into stages.
    build: Making the stages: parameters are put on the device.
    joint graph: AOTAutograd's trace of the stage's forward and backward.
    partition: Cutting that into functions.
    lowering: Running the functions on torch_xla's pending values; HLO, which is hashed.
    XLA: Compilation, which most of the time runs on several threads.
    other ranks: Waiting for what they tell.
    device: Waiting for programs.
    rest: All else, among it the dispatch of programs that wait for values.
peak_bytes: The largest size of the process (VmHWM), in all rounds; before_bytes is
    that size when the cell began.
programs: What XLA compiled; equal programs of a rank are compiled once.
second_s: The time of the second step.
..._spread: The first and the third quartile of these times.

With `--profile FOLDER` the main thread of each rank is profiled by its processor time,
which makes it about three times as slow; `python -m pstats` reads the files.
"""

import argparse
import contextlib
import cProfile
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpt
import sides
import torch
import torch.distributed as dist
from memory import status_bytes
from pinning import check_pinned
from sides import NUM_RANKS
from spread import medians_of, text_of
from torch.distributed.pipelining import SplitPoint

KINDS = ("traced", "manual")
LAYERS = (4, 12, 24, 48)
MICROBATCHES = 2
HEAD_WIDTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Say what to measure, and on which core each rank runs."""

    kind: str
    size: dict[str, int]
    stages: int
    cores: list[int]
    folder: str


def measure(job: Job) -> dict[str, Any]:
    """Do two steps; return what the first one has cost this rank."""
    core = sides.join(job.cores)
    import torch_xla_pp as xpp
    from torch_xla_pp import xla_compat

    rank = dist.get_rank()
    dist.barrier()
    before_bytes = status_bytes("VmHWM")
    num_before = xla_compat.num_compilations()
    tokens, target = gpt.make_batch(MICROBATCHES, job.size)
    inputs = () if rank else (tokens,)

    def step() -> None:
        schedule.step(*inputs, target=target if rank else None, losses=[])
        xla_compat.wait_device()

    with xpp.note_phases() as phases, _profiled(job, rank):
        made = _traced(job) if job.kind == "traced" else _manual(job)
        name = "Interleaved1F1B" if job.stages > 1 else "1F1B"
        schedule = sides.make_runner(name, made, MICROBATCHES)
        step()
        costs = phases.costs
    num_programs = xla_compat.num_compilations() - num_before
    peak_bytes = status_bytes("VmHWM")
    start = time.perf_counter()
    step()
    second_s = time.perf_counter() - start
    check_pinned(core)
    return {
        "kind": job.kind,
        "layers": job.size["layers"],
        "width": job.size["width"],
        "stages": job.stages,
        "rank": rank,
        "total_s": sum(cost.wall_s for cost in costs.values()),
        "total_cpu_s": sum(cost.process_s for cost in costs.values()),
        "phases": {name: asdict(cost) for name, cost in costs.items()},
        "before_bytes": before_bytes,
        "peak_bytes": peak_bytes,
        "programs": num_programs,
        "second_s": second_s,
    }


@contextlib.contextmanager
def _profiled(job: Job, rank: int) -> Iterator[None]:
    """Profile the block into a file of the job's folder, if it has one."""
    if not job.folder:
        yield
        return
    profile = cProfile.Profile(time.thread_time)
    with profile:
        yield
    folder = Path(job.folder)
    folder.mkdir(parents=True, exist_ok=True)
    profile.dump_stats(folder / f"{job.kind}_{job.size['layers']}_{rank}.prof")


def _traced(job: Job) -> list[Any]:
    """Return this rank's stages of a model that is traced without memory."""
    import torch_xla_pp as xpp
    from torch_xla_pp.phases import phase

    with phase("build"), xpp.deferred_init():
        model = gpt.make_part(0, 1, job.size)
    example = torch.zeros(gpt.ROWS, job.size["length"], dtype=torch.int64)
    layers = job.size["layers"] // (NUM_RANKS * job.stages)
    cut = {
        f"blocks.{index * layers}": SplitPoint.BEGINNING
        for index in range(1, NUM_RANKS * job.stages)
    }
    pipe = xpp.pipeline(model, mb_args=(example,), split_spec=cut)
    with phase("build"):
        return [pipe.build_stage(index, xpp.device()) for index in _own(job)]


def _manual(job: Job) -> list[Any]:
    """Return this rank's stages of a model that is built part by part."""
    import torch_xla_pp as xpp
    from torch_xla_pp.phases import phase

    count = NUM_RANKS * job.stages
    with phase("build"):
        return [
            xpp.PipelineStage(
                gpt.make_part(index, count, job.size), index, count, xpp.device()
            )
            for index in _own(job)
        ]


def _own(job: Job) -> range:
    return range(dist.get_rank(), NUM_RANKS * job.stages, NUM_RANKS)


def run(job: Job) -> list[dict[str, Any]]:
    """Return what each rank of new processes measures."""
    # The workers import this file, so its functions must not be those of `__main__`.
    import first_step

    from torch_xla_pp.testing import Worlds

    with Worlds() as worlds:
        found: list[dict[str, Any]] = worlds.run(
            first_step.measure, ranks=NUM_RANKS, args=(job,), timeout_s=1800
        )
    return found


def row_of(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of what a rank has measured in some rounds."""
    row = dict(rounds[0])
    names = [name for name, value in row.items() if isinstance(value, float)]
    row |= medians_of({name: [found[name] for found in rounds] for name in names})
    row["peak_bytes"] = max(found["peak_bytes"] for found in rounds)
    row["phases"] = {
        name: {
            figure: statistics.median(found["phases"][name][figure] for found in rounds)
            for figure in cost
        }
        for name, cost in row["phases"].items()
    }
    return row


def line_of(row: dict[str, Any]) -> str:
    """Return a row as lines of text; phases with processor seconds in brackets."""
    head = (
        f"{row['kind']} {row['layers']} layers of width {row['width']}, "
        f"{row['stages']} stages, rank {row['rank']}: {text_of(row, 'total_s', '.1f')} "
        f"s, {row['total_cpu_s']:.1f} s of processors, "
        f"peak {row['peak_bytes'] >> 20} MiB, "
        f"{row['before_bytes'] >> 20} before, {row['programs']} programs, "
        f"second step {row['second_s']:.2f} s"
    )
    parts = [
        f"{name} {cost['wall_s']:.1f} ({cost['process_s']:.1f})"
        for name, cost in row["phases"].items()
    ]
    return "\n    ".join([head, ", ".join(parts)])


def main() -> None:
    """Run the cells that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--layers", nargs="+", type=int, default=list(LAYERS))
    parser.add_argument("--stages", nargs="+", type=int, default=[1])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--size", choices=gpt.SIZES, help="instead of a width")
    parser.add_argument("--profile", default="", metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import first_step

    size = {"width": options.width, "length": options.length}
    size["heads"] = options.width // HEAD_WIDTH
    if options.size:
        size = gpt.SIZES[options.size]
    cells = itertools.product(options.kinds, options.layers, options.stages)
    for kind, layers, stages in cells:
        job = first_step.Job(
            kind=kind,
            size=size | {"layers": layers},
            stages=stages,
            cores=sorted(os.sched_getaffinity(0)),
            folder=options.profile,
        )
        found = [first_step.run(job) for _ in range(options.rounds)]
        for row in map(row_of, zip(*found, strict=True)):
            print(json.dumps(row) if options.json else line_of(row), flush=True)


if __name__ == "__main__":
    main()
