"""A step with freed memory kept, and with what glibc does.

    python benchmarks/heap.py
    python benchmarks/heap.py --size large --schedules 1F1B --rounds 1 --json

Two ranks of one local device each, rank r with all its threads on core r, train the GPT
of `gpt.py` with eight microbatches. Malloc is set once per process, so the sides take
turns in fresh processes; medians over turns, of the median step of each. Columns, as
the JSON names them:

kept_s, mapped_s, returned_s: Time of a step with what this package does, without its
    blocks of large values, which glibc then maps one by one, and with nothing of it.
to_mapped, to_returned: kept_s by these, of the same turn.
kept_cpu_s and so on: Processor time of a step, of both ranks.
kept_faults and so on: Pages that a step takes from the system, of both ranks.
kept_peak_mib and so on: Largest size that a rank's process has had, in all turns.
..._spread: The first and the third quartile of each of these but the largest size.
"""

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Sequence
from typing import Any

import gpt
import sides
import torch.distributed as dist
from pinning import check_pinned
from sides import NUM_RANKS, SCHEDULES
from spread import medians_of, ratios, text_of

MICROBATCHES = 8
WARM_UP = 3
STEPS = 8
SIDES = ("kept", "mapped", "returned")


def measure(
    schedule: str, size_name: str, cores: Sequence[int], side_name: str
) -> tuple[list[float], float, int, int]:
    """Return the seconds of some steps, and this rank's use of processor and memory.

    These are seconds and pages per step, and the largest size in MiB.
    """
    if side_name == "mapped":
        from torch_xla_pp.cpu import heap

        heap.keep_freed(())
    if side_name != "kept":
        os.environ["GLIBC_TUNABLES"] = ""  # the user has decided
    core = sides.join(cores)
    from torch_xla_pp import xla_compat

    side = sides.our_side(schedule, MICROBATCHES, gpt.SIZES[size_name])
    seconds = []
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            before = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        side.step()
        xla_compat.wait_device()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    check_pinned(core)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    faults = (after.ru_minflt - before.ru_minflt) // STEPS
    return seconds[WARM_UP:], cpu_s / STEPS, faults, after.ru_maxrss >> 10


def row_of(schedule: str, size_name: str, rounds: int) -> dict[str, Any]:
    """Measure both sides in turns."""
    # The workers import this file, so its functions must not be those of `__main__`.
    import heap

    from torch_xla_pp.testing import Worlds

    cores = sorted(os.sched_getaffinity(0))
    found: dict[str, list[Any]] = {name: [] for name in SIDES}
    for _ in range(rounds):
        for name, results in found.items():
            args = (schedule, size_name, cores, name)
            with Worlds() as worlds:
                results.append(
                    worlds.run(heap.measure, ranks=NUM_RANKS, args=args, timeout_s=1200)
                )
    row: dict[str, Any] = {"model": size_name, "schedule": schedule}
    by_turn: dict[str, list[float]] = {}
    for name, turns in found.items():
        by_turn[f"{name}_s"] = [statistics.median(turn[0][0]) for turn in turns]
        for index, what in ((1, "cpu_s"), (2, "faults")):
            by_turn[f"{name}_{what}"] = [
                sum(rank[index] for rank in turn) for turn in turns
            ]
        row[f"{name}_peak_mib"] = max(peak for turn in turns for *_, peak in turn)
    for name in SIDES[1:]:
        by_turn[f"to_{name}"] = ratios(by_turn["kept_s"], by_turn[f"{name}_s"])
    return row | medians_of(by_turn)


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    sides = [
        f"{name} {row[f'{name}_s']:.3f} s, {row[f'{name}_cpu_s']:.3f} s of processors,"
        f" {row[f'{name}_faults']:.0f} page faults, {row[f'{name}_peak_mib']} MiB"
        for name in SIDES
    ]
    both = f"{text_of(row, 'to_mapped')} and {text_of(row, 'to_returned')}"
    return f"{row['model']} {row['schedule']:14}  {'  '.join(sides)}  ratios {both}"


def main() -> None:
    """Measure the schedules that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=gpt.SIZES, default="small")
    parser.add_argument(
        "--schedules", nargs="+", choices=SCHEDULES, default=["GPipe", "1F1B"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for schedule in options.schedules:
        row = row_of(schedule, options.size, options.rounds)
        print(json.dumps(row) if options.json else line_of(row), flush=True)


if __name__ == "__main__":
    main()
