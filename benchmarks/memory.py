"""What schedules keep alive, beside what they promise.

    python benchmarks/memory.py
    python benchmarks/memory.py --size large --microbatches 8 32 --json

Two ranks of one local device each. Counted are the bytes that forwards save for their
backward; nothing is timed. Columns, as the JSON names them:

live: For each stage of the rank, the most microbatches that waited at once.
saved_bytes: The most bytes that a rank's stages held of them, together.
bound: Microbatches of the whole rank that the schedule's paper promises at most: M for
    GPipe, min(M, P - rank) for 1F1B (Narayanan et al. 2019, PipeDream-2BW), P for ZBV,
    whose two chunks of a rank count half each (Qi et al. 2024).
bound_bytes: The same times what one microbatch saves, as measured with one.
ratio: saved_bytes / bound_bytes; should be at most 1.
"""

import argparse
import json
import os
from typing import Any

import gpt
import sides
from sides import NUM_RANKS

SCHEDULES = ("GPipe", "1F1B", "ZBVZeroBubble")


def saved(schedule: str, microbatches: int, size: dict[str, int]) -> list[Any]:
    """Return live microbatches and saved bytes of each stage, after one step."""
    sides.join(sorted(os.sched_getaffinity(0)))
    side = sides.our_side(schedule, microbatches, size)
    side.step()
    found = []
    for stage in side.stages:
        memory = stage.peak_memory()
        # The schedule returns the outputs of the last stage: all of them stay.
        output = gpt.ROWS * size["length"] * gpt.VOCAB * 4 * stage.is_last
        found.append((memory.num_live, memory.saved_bytes - microbatches * output))
    return found


def rows_of(worlds: Any, schedule: str, microbatches: int, size: Any) -> list[Any]:
    """Return a row for each rank."""
    # The workers import this file, so its functions must not be those of `__main__`.
    import memory

    def run(count: int) -> list[Any]:
        args = (schedule, count, size)
        found: list[Any] = worlds.run(memory.saved, ranks=NUM_RANKS, args=args)
        return found

    rows = []
    few, many = run(NUM_RANKS), run(microbatches)
    for rank, (one, all_) in enumerate(zip(few, many, strict=True)):
        bound = {
            "GPipe": microbatches,
            "1F1B": min(microbatches, NUM_RANKS - rank),
            "ZBVZeroBubble": min(microbatches, NUM_RANKS),
        }[schedule]
        per_microbatch = sum(num_bytes / live for live, num_bytes in one)
        saved_bytes = sum(num_bytes for _, num_bytes in all_)
        rows.append(
            {
                "schedule": schedule,
                "microbatches": microbatches,
                "rank": rank,
                "live": [live for live, _ in all_],
                "saved_bytes": saved_bytes,
                "bound": bound,
                "bound_bytes": round(bound * per_microbatch),
                "ratio": saved_bytes / (bound * per_microbatch),
            }
        )
    return rows


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    return (
        f"{row['schedule']:14} M={row['microbatches']:<3} rank {row['rank']}"
        f"  live {row['live']!s:8} saved {row['saved_bytes'] / 2**20:7.1f} MiB"
        f"  bound {row['bound']:3} x = {row['bound_bytes'] / 2**20:7.1f} MiB"
        f"  ratio {row['ratio']:.2f}"
    )


def main() -> None:
    """Run the cells that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=gpt.SIZES, default="small")
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    from torch_xla_pp.testing import Worlds

    with Worlds() as worlds:
        for schedule in SCHEDULES:
            for count in options.microbatches:
                for row in rows_of(worlds, schedule, count, gpt.SIZES[options.size]):
                    print(json.dumps(row) if options.json else line_of(row), flush=True)


if __name__ == "__main__":
    main()
