"""Predicted beside measured steps.

    python benchmarks/prediction.py                  small model, five schedules
    python benchmarks/prediction.py --size large --microbatches 4 16 --json

Two ranks of one local device each, rank r with all its threads on core r; torch's
schedule classes; steps are recorded with `profile_step`. The cells take turns of two
steps, of which the second one is recorded: in the first, what the cell works on comes
back into the caches, from which the other cells have driven it. In every round, what
actions and messages take is measured in few cells, marked with *: one for each set of
stages and kinds. From that all cells are predicted.
Columns, as the JSON names them, all of which are medians over the rounds:

measured_s: From the first action's start to the last one's end.
predicted_s: The same of simulated steps, in the mean, as actions vary.
mean_s: The same of one step whose actions take their mean times, which is short.
error: predicted_s / measured_s - 1 of the same round. Should be within 5 %.
measured_bubble, predicted_bubble: Share of the ranks' time that is no work.
..._spread: The first and the third quartile of each of these.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import gpt
import sides
from pinning import check_pinned
from sides import NUM_RANKS, Side
from spread import medians_of, text_of

from torch_xla_pp.schedule import (
    Schedule,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zb1p,
    zbv,
)
from torch_xla_pp.simulate import (
    expected_step_s,
    measured_costs,
    measured_network,
    simulate,
)
from torch_xla_pp.timeline import Timeline, summarize

ROUNDS = 11
WARM_UP_ROUNDS = 3
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
    cells: Sequence[Cell], size_name: str, cores: Sequence[int], rounds: int
) -> list[dict[Cell, Timeline]]:
    """Record a step of each cell, again and again; every rank calls."""
    core = sides.join(cores)
    size = gpt.SIZES[size_name]
    made = {cell: sides.our_side(*cell, size) for cell in cells}
    found = []
    for _ in range(WARM_UP_ROUNDS + rounds):
        found.append({cell: recorded_step(side) for cell, side in made.items()})
    check_pinned(core)
    return found[WARM_UP_ROUNDS:]


def recorded_step(side: Side) -> Timeline:
    """Record one step, behind another one."""
    import torch_xla_pp as xpp

    side.step()
    with xpp.profile_step(side.runner) as profile:
        side.step()
    return profile.timeline


def row_of(
    cell: Cell, rounds: Sequence[dict[Cell, Timeline]], known: Sequence[Cell]
) -> dict[str, Any]:
    """Compare a cell, round by round, with what steps of the same stages predict."""
    schedule, microbatches = cell
    order = ORDERS[schedule](microbatches)
    measured = [steps[cell] for steps in rounds]
    predicted, expected_s = [], []
    for steps in rounds:
        sources = [steps[source] for source in known]
        costs, network = measured_costs(sources), measured_network(sources)
        predicted.append(simulate(order, costs, network))
        expected_s.append(expected_step_s(order, costs, network))
    pairs = zip(expected_s, measured, strict=True)
    found = {
        "measured_s": [step.step_s for step in measured],
        "predicted_s": expected_s,
        "mean_s": [step.step_s for step in predicted],
        "error": [guess_s / step.step_s - 1 for guess_s, step in pairs],
        "measured_bubble": [summarize(s).bubble_share for s in measured],
        "predicted_bubble": [summarize(s).bubble_share for s in predicted],
    }
    return {"schedule": schedule, "microbatches": microbatches} | medians_of(found)


def line_of(row: dict[str, Any], mark: str) -> str:
    """Return a row as a line of text."""
    return (
        f"{row['schedule']:21} M={row['microbatches']:<3}{mark:1}"
        f" measured {text_of(row, 'measured_s', '.3f')} s  predicted"
        f" {text_of(row, 'predicted_s', '.3f')} s  error"
        f" {text_of(row, 'error', '+.1%')}  bubble {row['measured_bubble']:5.1%}"
        f" and {row['predicted_bubble']:5.1%}"
    )


def main() -> None:
    """Run the cells that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=gpt.SIZES, default="small")
    parser.add_argument("--schedules", nargs="+", choices=ORDERS, default=list(ORDERS))
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
    everything = list(dict.fromkeys([*sum(sources.values(), []), *cells]))
    with Worlds() as worlds:
        rounds, _ = worlds.run(
            prediction.recorded,
            ranks=NUM_RANKS,
            args=(everything, options.size, cores, options.rounds),
            timeout_s=7200,
        )
    errors = []
    for cell in cells:
        used = sources[sides.num_stages_of(cell[0]) // NUM_RANKS]
        row = row_of(cell, rounds, used)
        errors.append(abs(row["error"]))
        mark = "*" if cell in used else ""
        print(json.dumps(row) if options.json else line_of(row, mark), flush=True)
    if not options.json:
        print(f"{len(cells)} cells, largest error {max(errors):.1%}. * was measured.")


if __name__ == "__main__":
    main()
