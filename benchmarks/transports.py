"""A training step through the host and with messages in its programs, side by side.

    python benchmarks/transports.py               small model, GPipe, 1F1B and ZBV
    python benchmarks/transports.py --size large --microbatches 4 16 --json

Two ranks of one local device each, rank r with all its threads on core r. Pipelines of
both transports are in the same processes and take turns of a few steps; medians over
turns are printed. Columns, as the JSON names them:

in_graph_s, host_s: Time of a step, the optimizer's included.
ratio: host_s / in_graph_s. Should be below 1.15.
cpu_ratio: The same of the processor time of all threads of both ranks, which other load
    of the machine disturbs less.
..._spread: The first and the third quartile of each of these; ratios are of turns.
compiles: Programs compiled in the timed steps, over both ranks; should be 0.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import gpt
import sides
import torch.distributed as dist
from pinning import check_pinned
from sides import NUM_RANKS, SCHEDULES, Side
from spread import medians_of, ratios, sums, text_of
from step_time import gathered, num_compiles

TRANSPORTS = ("in_graph", "host")
ROUNDS = 11
STEPS = 2
WARM_UP_ROUNDS = 2


def cell(
    schedule: str, microbatches: int, size_name: str, cores: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Measure one schedule; every rank calls, in a process of its own."""
    core = sides.join(cores)
    turns = {
        name: side_of(name, schedule, microbatches, size_name) for name in TRANSPORTS
    }
    times: dict[str, list[float]] = {}
    cpu_times: dict[str, list[float]] = {}
    before = 0
    for attempt in range(WARM_UP_ROUNDS + rounds):
        if attempt == WARM_UP_ROUNDS:
            before = num_compiles()
            times, cpu_times = ({name: [] for name in TRANSPORTS} for _ in range(2))
        for name, side in turns.items():
            step_s, cpu_s = step_times(side)
            times.setdefault(name, []).append(step_s)
            cpu_times.setdefault(name, []).append(cpu_s)
    check_pinned(core)
    compiles = sum(gathered(num_compiles() - before))
    cpu = {x: sums(gathered(cpu_times[x])) for x in TRANSPORTS}
    rounds = {f"{name}_s": own for name, own in times.items()}
    rounds["ratio"] = ratios(times["host"], times["in_graph"])
    rounds["cpu_ratio"] = ratios(cpu["host"], cpu["in_graph"])
    return {
        "model": size_name,
        "schedule": schedule,
        "microbatches": microbatches,
        "compiles": compiles,
    } | medians_of(rounds)


def side_of(transport: str, schedule: str, microbatches: int, size: str) -> Side:
    """Return this rank's part of a pipeline whose messages one transport carries."""
    from torch_xla_pp.transport import of_group

    group = dist.new_group(backend="xla_pp")
    with mock.patch.dict(os.environ, TORCH_XLA_PP_TRANSPORT=transport):
        assert of_group(group).transport.name == transport
    indices = sides.stage_indices(schedule, dist.get_rank())
    num_stages = sides.num_stages_of(schedule)
    make = sides.ours(group)
    return Side(make, schedule, indices, num_stages, microbatches, gpt.SIZES[size])


def step_times(side: Side) -> tuple[float, float]:
    """Return the time of a step, and the processor time of this rank's threads."""
    from torch_xla_pp import xla_compat

    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        side.step()
    xla_compat.wait_device()
    cpu_s = time.process_time() - cpu
    dist.barrier()
    return (time.perf_counter() - start) / STEPS, cpu_s / STEPS


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    return (
        f"{row['model']} {row['schedule']:14} M={row['microbatches']:<3} in graph "
        f"{row['in_graph_s']:6.3f} s  host {row['host_s']:6.3f} s  ratio "
        f"{text_of(row, 'ratio')}  of processor time {text_of(row, 'cpu_ratio')}  "
        f"compiles {row['compiles']}"
    )


def main() -> None:
    """Run the cells that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=gpt.SIZES, default="small")
    parser.add_argument(
        "--schedules",
        nargs="+",
        choices=SCHEDULES,
        default=["GPipe", "1F1B", "ZBVZeroBubble"],
    )
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # The workers import this file, so its functions must not be those of `__main__`.
    import transports

    from torch_xla_pp.testing import Worlds

    cores = sorted(os.sched_getaffinity(0))
    for schedule in options.schedules:
        for microbatches in options.microbatches:
            args = (schedule, microbatches, options.size, cores, options.rounds)
            with Worlds() as worlds:
                row, _ = worlds.run(
                    transports.cell, ranks=NUM_RANKS, args=args, timeout_s=3600
                )
            print(json.dumps(row) if options.json else line_of(row), flush=True)
    if not options.json:
        print(f"Medians of {options.rounds} turns, in which the transports alternate.")


if __name__ == "__main__":
    main()
