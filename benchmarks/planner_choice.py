"""Whether the planner chooses the fastest plan, and predicts how long it takes.

    python benchmarks/planner_choice.py
    python benchmarks/planner_choice.py --cuts 9 --microbatches 4 8 16 --rounds 7

Two ranks of one device train a GPT whose MLPs are of different widths, rank r with all
its threads on core r. First both ranks measure its works, at the same time, with the
rows of each number of microbatches. From that the planner chooses freely
among the schedules and numbers of microbatches, and predicts that plan and others:
every way to cut the blocks once near the middle, and, of each schedule, the best plan.
Then all of them run, one recorded step each in turn.
Columns, as the JSON names them:

plan: Where it is cut: works of each stage.
schedule, microbatches: The order, and how many.
measured_s: Median of recorded steps, from the first action's start to the last's end.
quartiles_s: The quartiles of these.
predicted_s: The same of the step that the plan predicts.
error: predicted_s / measured_s - 1.
chosen: Whether the planner has chosen it.

The last line has `regret`: by how much the chosen plan took longer than the fastest;
`spearman`: the correlation of predicted and measured ranks; `median_error` and
`largest_error`: of all plans, without sign.
"""

import argparse
import json
import os
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

import gpt
import planner_runs as runs
import torch
from torch import Tensor, nn

from torch_xla_pp.planner import MeasuredCosts, PipelinePlan, make_plan
from torch_xla_pp.planner.evaluation import Evaluator, Setting
from torch_xla_pp.work import WorkGraph

FACTORS = (1, 1, 2, 2, 4, 4, 8, 2, 1, 1)
SIZE = {"width": 256, "heads": 4, "layers": 1, "length": 128, "vocab": 2048}
ROWS = 32
ROUNDS = 7
SCHEDULES = ("1f1b", "zb1p", "interleaved", "zbv", "gpipe")


class Block(gpt.Block):
    """A block with an MLP of another width."""

    def __init__(self, width: int, heads: int, factor: int) -> None:
        super().__init__(width, heads)
        self.up = nn.Linear(width, factor * width)
        self.down = nn.Linear(factor * width, width)


class UnevenGpt(nn.Module):
    """A GPT whose blocks cost differently."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        width, vocab = SIZE["width"], SIZE["vocab"]
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, SIZE["heads"], f) for f in FACTORS)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, `(B, L, vocab)`."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def example_of(rows: int) -> runs.Batch:
    """Return tokens and targets, each `(rows, length)`."""
    tokens, targets = gpt.make_batch(rows // gpt.ROWS, SIZE)
    return (tokens,), targets


def measured(cores: Sequence[int], counts: Sequence[int]) -> tuple[str, str]:
    """Return the work of the model, and what it takes on this rank, as JSON."""
    rows = sorted({ROWS // count for count in counts})
    return runs.measure(cores, UnevenGpt, example_of(max(rows)), rows)


def plans_of(
    work: WorkGraph, costs: MeasuredCosts, counts: Sequence[int], num_cuts: int
) -> tuple[list[str], list[bool]]:
    """Return plans as JSON, and which of them is the planner's choice."""
    options: dict[str, Any] = {**runs.OPTIONS, "rows": ROWS, "costs": costs}
    evaluator = runs.evaluator_of(work, costs)
    chosen = make_plan(work, microbatches=counts, schedules=SCHEDULES, **options)
    found = {_name(chosen): chosen}
    for count in counts:
        for name in SCHEDULES:
            plan = make_plan(work, microbatches=(count,), schedules=(name,), **options)
            found.setdefault(_name(plan), plan)
        middle = len(work.works) // 2
        for border in range(middle - num_cuts // 2, middle - num_cuts // 2 + num_cuts):
            plan = _cut_at(evaluator, border, count)
            found.setdefault(_name(plan), plan)
    plans = found.values()
    return [plan.to_json() for plan in plans], [plan is chosen for plan in plans]


def _cut_at(evaluator: Evaluator, border: int, count: int) -> PipelinePlan:
    """Return the plan of two stages with a given border under 1F1B."""
    setting = Setting(num_ranks=2, rows=ROWS // count, num_microbatches=count)
    stages = [int(place >= border) for place in range(evaluator.table.num_works)]
    return runs.plan_of_cut(evaluator, runs.cut_into(stages, setting))


def _name(plan: PipelinePlan) -> tuple[Any, ...]:
    sizes = tuple(len(stage.ops) for stage in plan.stages)
    return plan.schedule.name, plan.batch.microbatches, sizes


def recorded(
    texts: Sequence[str], cores: Sequence[int], rounds: int
) -> list[list[float]]:
    """Run plans in turns, and return the seconds of their recorded steps."""
    return runs.record(cores, [UnevenGpt] * len(texts), example_of, texts, rounds)


def row_of(text: str, seconds: Sequence[float], is_chosen: bool) -> dict[str, Any]:
    """Return what is measured of a plan beside what it predicts."""
    plan = PipelinePlan.from_json(text)
    predicted_s, measured_s = runs.predicted_s(plan), median(seconds)
    low, _, high = quantiles(seconds, n=4)
    return {
        "plan": "+".join(str(len(stage.ops)) for stage in plan.stages),
        "schedule": plan.schedule.name,
        "microbatches": plan.batch.microbatches,
        "measured_s": measured_s,
        "quartiles_s": (low, high),
        "predicted_s": predicted_s,
        "error": predicted_s / measured_s - 1,
        "chosen": is_chosen,
    }


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how good the choice and the predictions are."""
    measured = [row["measured_s"] for row in rows]
    (chosen_s,) = (row["measured_s"] for row in rows if row["chosen"])
    errors = [abs(row["error"]) for row in rows]
    return {
        "plans": len(rows),
        "regret": chosen_s / min(measured) - 1,
        "spearman": spearman([row["predicted_s"] for row in rows], measured),
        "median_error": median(errors),
        "largest_error": max(errors),
        "within_10": sum(error <= 0.1 for error in errors) / len(errors),
    }


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the correlation of the ranks of two sequences without equal items."""
    places = [{v: n for n, v in enumerate(sorted(x))} for x in (first, second)]
    count = len(first)
    pairs = zip(first, second, strict=True)
    squares = sum((places[0][a] - places[1][b]) ** 2 for a, b in pairs)
    return 1 - 6 * squares / (count * (count**2 - 1))


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    low, high = row["quartiles_s"]
    return (
        f"{row['plan']:>16} {row['schedule']:11} M={row['microbatches']:<3}"
        f" measured {row['measured_s']:.4f} s ({low:.4f} to {high:.4f})"
        f"  predicted {row['predicted_s']:.4f} s  error {row['error']:+6.1%}"
        f"{'  chosen' if row['chosen'] else ''}"
    )


def main() -> None:
    """Run the plans that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=7)
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # The workers import this file, so its functions must not be those of `__main__`.
    import planner_choice

    from torch_xla_pp.testing import Worlds

    cores = sorted(os.sched_getaffinity(0))
    with Worlds() as worlds:
        (work, costs), _ = worlds.run(
            planner_choice.measured,
            ranks=2,
            args=(cores, options.microbatches),
            timeout_s=3600,
        )
        texts, chosen = plans_of(
            WorkGraph.from_json(work),
            MeasuredCosts.from_json(costs),
            options.microbatches,
            options.cuts,
        )
        seconds, _ = worlds.run(
            planner_choice.recorded,
            ranks=2,
            args=(texts, cores, options.rounds),
            timeout_s=3600,
        )
    rows = [row_of(*found) for found in zip(texts, seconds, chosen, strict=True)]
    for row in sorted(rows, key=lambda row: row["measured_s"]):
        print(json.dumps(row) if options.json else line_of(row), flush=True)
    print(json.dumps(summary_of(rows)))


if __name__ == "__main__":
    main()
