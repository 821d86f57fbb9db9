"""What a rank holds, beside what its process takes and what the schedule promises.

    python benchmarks/memory.py
    python benchmarks/memory.py --size words --schedules 1F1B --microbatches 4 32 --json

Two ranks of one local device each train the GPT of `gpt.py` with AdamW, each cell in
fresh processes, several times; nothing is timed. Columns, as the JSON names them, which
are medians, with their quartiles as `..._spread` where rounds differ:

live: For each stage of the rank, the most microbatches that waited at once.
saved_bytes: The most bytes that lay between programs for them at once, of all stages of
    the rank: what forwards save for backwards, gradients of losses, outputs.
passed_bytes: The most that backwards of inputs left for those of weights.
held_bytes: The most of both at once.
bound: Microbatches of the whole rank that the schedule's paper promises at most: M for
    GPipe, min(M, P - rank) for 1F1B (Narayanan et al. 2019, PipeDream-2BW), P for ZBV,
    whose two chunks of a rank count half each (Qi et al. 2024).
bound_bytes: The same times what one microbatch saves, as measured with M = P in steps
    that are recorded, which have forward and backward as programs of their own.
saved_ratio: saved_bytes / bound_bytes; should be at most 1.
peak_bytes: What `rank_memory()` says that the rank's stages held at most, together.
process_bytes: By how much the largest size of the process, from the fourth step on,
    exceeds its size once it has dropped the stages: what the training takes, as the
    system sees it.
peak_ratio: peak_bytes / process_bytes.
largest_bytes: The largest size of the process from the fourth step on.
"""

import argparse
import ctypes
import gc
import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gpt
import sides
import torch
from sides import NUM_RANKS
from spread import medians_of, text_of

SCHEDULES = ("GPipe", "1F1B", "ZBVZeroBubble")
# By then the heap has grown to what it needs, but for a few pages.
STEPS = 8
# Then all is compiled, the optimizer's program, too.
WARM_UP = 3


def measure(
    schedule: str, microbatches: int, size: dict[str, int], is_recorded: bool
) -> dict[str, Any]:
    """Return what this rank held in the last of some steps, and its process's size."""
    sides.join(sorted(os.sched_getaffinity(0)))
    import torch_xla_pp as xpp
    from torch_xla_pp import xla_compat

    side = sides.our_side(schedule, microbatches, size, torch.optim.AdamW)
    for step in range(STEPS):
        if step == WARM_UP:
            Path("/proc/self/clear_refs").write_text("5")  # forget the largest size
        with xpp.profile_step(side.runner) if is_recorded else nullcontext():
            side.step()
        xla_compat.wait_device()
    found = _held(side) | {"largest": status_bytes("VmHWM")}
    del side
    _give_back()
    return found | {"process": found["largest"] - status_bytes("VmRSS")}


def _held(side: sides.Side) -> dict[str, Any]:
    """Return what the stages of this rank held in the last step, by their own count."""
    held = [stage.peak_memory() for stage in side.stages]
    together = side.stages[0].rank_memory()
    return {
        "live": [memory.num_live for memory in held],
        "each_saved": [memory.saved_bytes for memory in held],
        "saved": together.saved_bytes,
        "passed": together.passed_bytes,
        "held": together.held_bytes,
        "peak": together.peak_bytes,
    }


def _give_back() -> None:
    """Give all memory that is free in this process back to the system."""
    from torch_xla_pp import cpu

    gc.collect()
    cpu.begin_step(has_compiled=True)
    ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def status_bytes(name: str) -> int:
    """Return a size that Linux knows of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise LookupError(name)


def run(
    schedule: str, microbatches: int, size_name: str, *, is_recorded: bool = False
) -> list[dict[str, Any]]:
    """Return what each rank of new processes measures."""
    # The workers import this file, so its functions must not be those of `__main__`.
    import memory

    from torch_xla_pp.testing import Worlds

    args = (schedule, microbatches, gpt.SIZES[size_name], is_recorded)
    with Worlds() as worlds:
        found: list[dict[str, Any]] = worlds.run(
            memory.measure, ranks=NUM_RANKS, args=args, timeout_s=1200
        )
    return found


def rows_of(
    schedule: str, counts: list[int], size_name: str, rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each number of microbatches and rank."""
    few = run(schedule, NUM_RANKS, size_name, is_recorded=True)
    rows = []
    for count in counts:
        found = [run(schedule, count, size_name) for _ in range(rounds)]
        for rank, own in enumerate(zip(*found, strict=True)):
            row = {"size": size_name, "schedule": schedule, "microbatches": count}
            bound = _bound(schedule, count, rank)
            rows.append(row | {"rank": rank} | _row(bound, few[rank], own))
    return rows


def _bound(schedule: str, microbatches: int, rank: int) -> int:
    return {
        "GPipe": microbatches,
        "1F1B": min(microbatches, NUM_RANKS - rank),
        "ZBVZeroBubble": min(microbatches, NUM_RANKS),
    }[schedule]


def _row(
    bound: int, few: dict[str, Any], rounds: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return what was found on a rank, beside what was promised and expected.

    What it counts itself is the same in each round, that of the last one here.
    """
    found = rounds[-1]
    per_microbatch = sum(
        num_bytes / live
        for live, num_bytes in zip(few["live"], few["each_saved"], strict=True)
    )
    return {
        "live": found["live"],
        "saved_bytes": found["saved"],
        "passed_bytes": found["passed"],
        "held_bytes": found["held"],
        "bound": bound,
        "bound_bytes": round(bound * per_microbatch),
        "saved_ratio": found["saved"] / (bound * per_microbatch),
        "peak_bytes": found["peak"],
    } | medians_of(
        {
            "process_bytes": [own["process"] for own in rounds],
            "peak_ratio": [own["peak"] / own["process"] for own in rounds],
            "largest_bytes": [own["largest"] for own in rounds],
        }
    )


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text, with sizes in MiB."""
    saved, passed, held, bound, peak, process, largest = (
        f"{row[f'{name}_bytes'] / 2**20:7.1f}"
        for name in ("saved", "passed", "held", "bound", "peak", "process", "largest")
    )
    return (
        f"{row['size']} {row['schedule']:14} M={row['microbatches']:<3}"
        f" rank {row['rank']}  live {row['live']!s:8} saved {saved}"
        f"  passed {passed}  held {held}"
        f"  bound {row['bound']:3} x = {bound}  ratio {row['saved_ratio']:.2f}"
        f"  peak {peak}  process {process}  ratio {text_of(row, 'peak_ratio')}"
        f"  largest {largest}"
    )


def main() -> None:
    """Run the cells that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=gpt.SIZES, default="small")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for schedule in options.schedules:
        for row in rows_of(
            schedule, options.microbatches, options.size, options.rounds
        ):
            print(json.dumps(row) if options.json else line_of(row), flush=True)


if __name__ == "__main__":
    main()
