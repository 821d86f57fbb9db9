"""Predicted beside measured steps.

    python benchmarks/prediction.py                  small model, five schedules
    python benchmarks/prediction.py --size large --microbatches 4 16 --json

Two ranks of one local device each, rank r with all its threads on core r; torch's
schedule classes; steps are recorded with `profile_step`. What actions take, and
messages, is measured in few cells, marked with *: one for each set of stages and
kinds. From that all cells are predicted. Columns, as the JSON names them:

measured_s: From the first action's start to the last one's end, the median of the
    recorded steps.
predicted_s: The same of the simulated step.
error: predicted_s / measured_s - 1. Should be within 10 %.
measured_bubble, predicted_bubble: Share of the ranks' time that is no work, medians.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import gpt
import sides
import torch.distributed as dist
from pinning import check_pinned, pin
from sides import NUM_RANKS, SCHEDULES, Side

from torch_xla_pp.schedule import (
    Schedule,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zb1p,
    zbv,
)
from torch_xla_pp.simulate import measured_costs, measured_network, simulate
from torch_xla_pp.timeline import Timeline, summarize

ROUNDS = 7
WARM_UP_STEPS = 3
# Schedules that are measured, by the number of stages of a rank; together they have all
# kinds of actions.
MEASURED = {1: ("1F1B",), 2: ("Interleaved1F1B", "ZBVZeroBubble")}
ORDERS: dict[str, Callable[[int], Schedule]] = {
    "GPipe": lambda count: gpipe(NUM_RANKS, count),
    "1F1B": lambda count: one_f_one_b(NUM_RANKS, count),
    "Interleaved1F1B": lambda count: interleaved_1f1b(NUM_RANKS, count, 2),
    "InterleavedZeroBubble": lambda count: zb1p(NUM_RANKS, count, 2),
    "ZBVZeroBubble": lambda count: zbv(NUM_RANKS, count),
}

Cell = tuple[str, int]  # schedule and number of microbatches


def recorded(
    schedule: str, microbatches: int, size_name: str, cores: Sequence[int], rounds: int
) -> list[Timeline]:
    """Record steps; every rank calls, in a process of its own."""
    rank = int(os.environ["RANK"])
    pin(cores[rank % len(cores)])
    import torch_xla_pp as xpp

    xpp.device()
    dist.init_process_group("xla_pp")
    side = Side(
        sides.ours(),
        schedule,
        sides.stage_indices(schedule, rank),
        sides.num_stages_of(schedule),
        microbatches,
        gpt.SIZES[size_name],
    )
    found = []
    for _ in range(WARM_UP_STEPS + rounds):
        with xpp.profile_step(side.runner) as profile:
            side.step()
        found.append(profile.timeline)
    check_pinned(cores[rank % len(cores)])
    return found[WARM_UP_STEPS:]


def row_of(cell: Cell, steps: Sequence[Timeline], known: Sequence[Timeline]) -> Any:
    """Compare the steps of a cell with what others predict.

    Args:
        cell: The cell.
        steps: Its steps.
        known: Steps of the same stages.
    """
    schedule, microbatches = cell
    predicted = simulate(
        ORDERS[schedule](microbatches), measured_costs(known), measured_network(known)
    )
    measured_s = statistics.median(step.step_s for step in steps)
    bubbles = [summarize(step).bubble_share for step in steps]
    return {
        "schedule": schedule,
        "microbatches": microbatches,
        "measured_s": measured_s,
        "predicted_s": predicted.step_s,
        "error": predicted.step_s / measured_s - 1,
        "measured_bubble": statistics.median(bubbles),
        "predicted_bubble": summarize(predicted).bubble_share,
    }


def line_of(row: dict[str, Any], mark: str) -> str:
    """Return a row as a line of text."""
    return (
        f"{row['schedule']:21} M={row['microbatches']:<3}{mark:1}"
        f" measured {row['measured_s']:7.4f} s  predicted {row['predicted_s']:7.4f} s"
        f"  error {row['error']:+6.1%}  bubble {row['measured_bubble']:5.1%}"
        f" and {row['predicted_bubble']:5.1%}"
    )


def main() -> None:
    """Run the cells that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=gpt.SIZES, default="small")
    parser.add_argument(
        "--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES)
    )
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # The workers import this file, so its functions must not be those of `__main__`.
    import prediction

    from torch_xla_pp.testing import Worlds

    cores = sorted(os.sched_getaffinity(0))
    count = options.microbatches[len(options.microbatches) // 2]
    sets = {sides.num_stages_of(name) // NUM_RANKS for name in options.schedules}
    sources = {n: [(name, count) for name in MEASURED[n]] for n in sets}
    cells = [(name, m) for name in options.schedules for m in options.microbatches]
    steps: dict[Cell, list[Timeline]] = {}
    for schedule, microbatches in dict.fromkeys([*sum(sources.values(), []), *cells]):
        with Worlds() as worlds:
            steps[schedule, microbatches], _ = worlds.run(
                prediction.recorded,
                ranks=NUM_RANKS,
                args=(schedule, microbatches, options.size, cores, options.rounds),
                timeout_s=3600,
            )
    errors = []
    for cell in cells:
        used = sources[sides.num_stages_of(cell[0]) // NUM_RANKS]
        row = row_of(cell, steps[cell], [step for key in used for step in steps[key]])
        errors.append(abs(row["error"]))
        mark = "*" if cell in used else ""
        print(json.dumps(row) if options.json else line_of(row, mark), flush=True)
    if not options.json:
        print(f"{len(cells)} cells, largest error {max(errors):.1%}. * was measured.")


if __name__ == "__main__":
    main()
