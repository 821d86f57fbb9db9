"""What recording a timeline adds to a training step.

    python benchmarks/timeline_cost.py                 small model, 1F1B and ZBV
    python benchmarks/timeline_cost.py --size large --microbatches 4 16 --json

Two ranks of one local device each, rank r with all its threads on core r. Steps without
and with a recording take turns in the same processes; medians are printed. Columns, as
the JSON names them:

off_s, on_s: Time of a step, the optimizer's included, without and with a recording.
ratio: on_s / off_s. Should be below 1.02.
cpu_ratio: The same of the processor time of all threads of both ranks, which other load
    of the machine disturbs less.
around_s: What `profile_step` takes before and after the step, to compare clocks and to
    gather the notes of all ranks.
..._spread: The first and the third quartile of each of these; ratios are of two steps,
    one behind the other.
compiles: Programs compiled in the timed steps, over both ranks; should be 0.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from typing import Any

import gpt
import sides
import torch.distributed as dist
from pinning import check_pinned
from sides import NUM_RANKS, SCHEDULES, Side
from spread import medians_of, ratios, sums, text_of
from step_time import gathered, num_compiles

ROUNDS = 15
SIDES = ("off", "on", "around")
WARM_UP_ROUNDS = 2


def cell(
    schedule: str, microbatches: int, size_name: str, cores: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Measure one schedule; every rank calls, in a process of its own."""
    core = sides.join(cores)
    import torch_xla_pp as xpp

    side = sides.our_side(schedule, microbatches, gpt.SIZES[size_name])
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    cpu_times: dict[str, list[float]] = {name: [] for name in SIDES}
    before = 0
    for attempt in range(WARM_UP_ROUNDS + rounds):
        if attempt == WARM_UP_ROUNDS:
            before = num_compiles()
            times = {name: [] for name in SIDES}
            cpu_times = {name: [] for name in SIDES}
        off = step_times(side)
        start = time.perf_counter()
        with xpp.profile_step(side.runner):
            on = step_times(side)
        around_s = time.perf_counter() - start - on[0]
        for name, (time_s, cpu_s) in zip(
            SIDES, (off, on, (around_s, 0.0)), strict=True
        ):
            times[name].append(time_s)
            cpu_times[name].append(cpu_s)
    check_pinned(core)
    row: dict[str, Any] = {
        "model": size_name,
        "schedule": schedule,
        "microbatches": microbatches,
    }
    found = {f"{name}_s": own for name, own in times.items()}
    found["ratio"] = ratios(times["on"], times["off"])
    cpu = {name: sums(gathered(cpu_times[name])) for name in ("off", "on")}
    found["cpu_ratio"] = ratios(cpu["on"], cpu["off"])
    row |= medians_of(found)
    row["compiles"] = sum(gathered(num_compiles() - before))
    return row


def step_times(side: Side) -> tuple[float, float]:
    """Return the seconds in which all ranks do a step, and this rank's CPU time."""
    from torch_xla_pp import xla_compat

    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    side.step()
    xla_compat.wait_device()
    cpu_s = time.process_time() - cpu_start
    dist.barrier()
    return time.perf_counter() - start, cpu_s


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    return (
        f"{row['model']} {row['schedule']:21} M={row['microbatches']:<3}"
        f" off {row['off_s']:6.3f} s  on {row['on_s']:6.3f} s"
        f"  ratio {text_of(row, 'ratio', '.3f')}"
        f"  cpu ratio {text_of(row, 'cpu_ratio', '.3f')}"
        f"  around {row['around_s'] * 1e3:5.1f} ms  compiles {row['compiles']}"
    )


def main() -> None:
    """Run the cells that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=gpt.SIZES, default="small")
    parser.add_argument(
        "--schedules",
        nargs="+",
        choices=SCHEDULES,
        default=["1F1B", "ZBVZeroBubble"],
    )
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # The workers import this file, so its functions must not be those of `__main__`.
    import timeline_cost

    from torch_xla_pp.testing import Worlds

    cores = sorted(os.sched_getaffinity(0))
    for schedule in options.schedules:
        for microbatches in options.microbatches:
            with Worlds() as worlds:
                row, _ = worlds.run(
                    timeline_cost.cell,
                    ranks=NUM_RANKS,
                    args=(schedule, microbatches, options.size, cores, options.rounds),
                    timeout_s=3600,
                )
            print(json.dumps(row) if options.json else line_of(row), flush=True)
    if not options.json:
        print(f"Medians of {options.rounds} steps each, which alternate.")


if __name__ == "__main__":
    main()
