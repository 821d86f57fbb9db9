"""Whether branches on ranks of their own make a step shorter, as predicted.

    python benchmarks/planner_branches.py
    python benchmarks/planner_branches.py --microbatches 2 4 8 --rounds 15 --json

Two ranks of one device train a small MMT of GraphPipe's: two branches of blocks, an
input for each, and a join. Rank r has all its threads on core r. First both ranks
measure its works, at the same time. From that plans are made for each number of
microbatches, and all of them run, one recorded step each in turn.
Columns, as the JSON names them:

ranks, model, microbatches: The cell.
plan: `branches`: a stage for each branch and one for the join. All inputs go through
    the first stage, so the first work of each branch is a stage, too; else the other
    branch would wait for this one. Of all ways to place the stages, the best.
    `full`: the planner's own. `line`: one stage a rank, cut in the order of the
    program, under 1F1B. `spp`: the best plan of stages that are a chain, whatever its
    order of actions.
stages: The rank and the number of works of each stage.
schedule: The order of actions.
measured_s: Median of recorded steps, from the first action's start to the last's end.
quartiles_s: The quartiles of these.
predicted_s: The same of the step that the plan predicts.
ratio_measured: How many times as long as `branches` it took: the median of all turns.
ratio_predicted: The same as predicted.
ratio_error: ratio_predicted / ratio_measured - 1.
won: In which part of the turns `branches` was faster.
full_won: In which part of them `full` was.

The last line has `won` and `full_won` of `line` and `spp` together, and the largest
`ratio_error` of theirs, without sign.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import gpt
import planner_runs as runs
import torch
from torch import nn

from torch_xla_pp.planner import MeasuredCosts, PipelinePlan, make_plan
from torch_xla_pp.planner.evaluation import Evaluator, Setting
from torch_xla_pp.work import WorkGraph

SIZE = {"width": 256, "heads": 4, "layers": 4, "length": 128, "vocab": 64}
ROWS = 4
ROUNDS = 9
# Plan → how the planner makes it.
PLANNERS: dict[str, dict[str, Any]] = {
    "full": {},
    "line": {"planner": "spp", "schedules": ("1f1b",)},
    "spp": {"planner": "spp"},
}
OTHERS = ("line", "spp")


def make_model() -> nn.Module:
    """Return the model, which is the same on all ranks."""
    torch.manual_seed(0)
    return gpt.Branches(SIZE)


def batch_of(rows: int) -> runs.Batch:
    """Return tokens of both branches and targets, each `(rows, length)`."""
    tokens, targets = gpt.make_batch(rows // gpt.ROWS, SIZE)
    return (tokens, targets), targets


def measured(cores: Sequence[int]) -> tuple[str, str]:
    """Return the work of the model, and what it takes on this rank, as JSON."""
    return runs.measure(cores, make_model, batch_of(ROWS), [ROWS])


def plans_of(
    work: WorkGraph, costs: MeasuredCosts, count: int
) -> Iterator[tuple[str, PipelinePlan]]:
    """Yield plans for a number of microbatches."""
    yield "branches", branches_plan(runs.evaluator_of(work, costs), count)
    for name, own in PLANNERS.items():
        yield (
            name,
            make_plan(
                work,
                rows=count * ROWS,
                microbatches=(count,),
                costs=costs,
                **runs.OPTIONS,
                **own,
            ),
        )


def branches_plan(evaluator: Evaluator, count: int) -> PipelinePlan:
    """Return the best plan in which branches and join are stages of their own."""
    setting = Setting(num_ranks=2, rows=ROWS, num_microbatches=count, schedule="list")
    stages = branch_stages(evaluator.table.graph)
    placements = product(range(2), repeat=max(stages) + 1)
    cuts = [
        runs.cut_into(stages, setting, placement)
        for placement in placements
        if len({*placement}) == 2
    ]
    best = min(cuts, key=lambda cut: evaluator.evaluate(cut).sort_key)
    return runs.plan_of_cut(evaluator, best)


def branch_stages(work: WorkGraph) -> list[int]:
    """Return the stage of each work, cut at the start of each branch and of the join.

    It is cut after the first work of each branch, too.
    """
    firsts = [n for n, one in enumerate(work.works) if "embedding" in one.ops[0]]
    (join,) = (n for n, one in enumerate(work.works) if "cat" in one.ops)
    borders = {join, *firsts, *(first + 1 for first in firsts)}
    return [
        sum(border <= place for border in borders) - 1
        for place in range(len(work.works))
    ]


def recorded(
    texts: Sequence[str], cores: Sequence[int], rounds: int
) -> list[list[float]]:
    """Run plans in turns, and return the seconds of their recorded steps."""
    return runs.record(cores, [make_model] * len(texts), batch_of, texts, rounds)


def rows_of(
    plans: dict[str, PipelinePlan], seconds: Sequence[Sequence[float]]
) -> Iterator[dict[str, Any]]:
    """Yield what is measured of each plan beside what it predicts."""
    by_plan = dict(zip(plans, seconds, strict=True))
    for row in runs.compared("mmt2", plans, seconds, "branches"):
        won, full_won = (
            sum(a < b for a, b in zip(by_plan[name], by_plan[row["plan"]], strict=True))
            / len(by_plan[name])
            for name in ("branches", "full")
        )
        yield {**row, "won": won, "full_won": full_won}


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return how often branches won, and how good the predicted ratios are."""
    others = [row for row in rows if row["plan"] in OTHERS]
    return {
        "won": sum(row["won"] for row in others) / len(others),
        "full_won": sum(row["full_won"] for row in others) / len(others),
        "ratio_error": max(abs(row["ratio_error"]) for row in others),
    }


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    return f"{runs.line_of(row)}  won {row['won']:.0%}  full {row['full_won']:.0%}"


def main() -> None:
    """Run the plans for the numbers of microbatches of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # The workers import this file, so its functions must not be those of `__main__`.
    import planner_branches

    from torch_xla_pp.testing import Worlds

    cores = sorted(os.sched_getaffinity(0))
    with Worlds() as worlds:
        (text, seconds), _ = worlds.run(
            planner_branches.measured, ranks=2, args=(cores,), timeout_s=3600
        )
        work, costs = WorkGraph.from_json(text), MeasuredCosts.from_json(seconds)
        cells = [dict(plans_of(work, costs, m)) for m in options.microbatches]
        texts = [plan.to_json() for plans in cells for plan in plans.values()]
        found, _ = worlds.run(
            planner_branches.recorded,
            ranks=2,
            args=(texts, cores, options.rounds),
            timeout_s=3600,
        )
    rows = []
    for plans in cells:
        own, found = found[: len(plans)], found[len(plans) :]
        rows += rows_of(plans, own)
    for row in rows:
        print(json.dumps(row) if options.json else line_of(row), flush=True)
    print(json.dumps(summary_of(rows)))


if __name__ == "__main__":
    main()
