"""Plans for more ranks than the machine has cores, whose computing only takes time.

    python benchmarks/planner_paced.py
    python benchmarks/planner_paced.py --microbatches 8 16 --rounds 9 --json

Eight ranks of one device train four equal branches with a small join. Where a block
would compute it pauses, see `torch_xla_pp.testing.pause`, so that all ranks go on at
the same time: programs, schedules and messages are real. What works take is measured
first, from that plans are made, and all of them run, one recorded step each in turn.
Columns, as the JSON names them:

ranks, model, microbatches: The cell.
plan: `full`: the planner's own. `spp`: the best plan of stages that run as a chain. As
    stages here wait for nothing but the values that they use, each branch of its model
    begins with the end of the one before, times zero.
schedule: The order of actions.
stages: The rank and the number of works of each stage.
measured_s: Median of recorded steps, from the first action's start to the last's end.
quartiles_s: The quartiles of these.
predicted_s: The same of the step that the plan predicts.
ratio_measured: How many times as long as `full` it took: the median of all turns.
ratio_predicted: The same as predicted.
ratio_error: ratio_predicted / ratio_measured - 1.
"""

import argparse
import json
import os
from collections.abc import Sequence
from functools import partial

import planner_runs as runs
import torch
from torch import Tensor, nn

from torch_xla_pp.planner import MeasuredCosts, PipelinePlan, make_plan
from torch_xla_pp.planner.settings import PlannerName
from torch_xla_pp.testing import pause
from torch_xla_pp.work import WorkGraph

MODEL = "4 paced branches"
RANKS, BRANCHES, BLOCKS, ROWS, WIDTH = 8, 4, 4, 4, 16
FORWARD_S, BACKWARD_S = 0.03, 0.06
# The join takes so much of a block's time.
JOIN_PART = 0.2
PLANS: tuple[PlannerName, ...] = ("full", "spp")


class PacedBlock(nn.Module):
    """A small layer that takes the time of a large one."""

    def __init__(self, inputs: int, outputs: int, part: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        """Return values, `(rows, outputs)`."""
        return pause(self.layer(x), self.part * FORWARD_S, self.part * BACKWARD_S)


class PacedBranches(nn.Module):
    """Equal branches with an input for each, and a join.

    Args:
        is_chain: Whether each branch waits for the one before.
    """

    def __init__(self, is_chain: bool) -> None:
        super().__init__()
        self.is_chain = is_chain
        blocks = [[PacedBlock(WIDTH, WIDTH) for _ in range(BLOCKS)] for _ in "abcd"]
        self.branches = nn.ModuleList(nn.Sequential(*own) for own in blocks)
        self.join = PacedBlock(BRANCHES * WIDTH, WIDTH, JOIN_PART)

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """Return logits, `(rows, 1, WIDTH)`."""
        found: list[Tensor] = []
        for branch, x in zip(self.branches, (a, b, c, d), strict=True):
            waits = self.is_chain and found
            found.append(branch(x + 0.0 * found[-1] if waits else x))
        return self.join(torch.cat(found, 1))[:, None]


def make_model(name: str) -> nn.Module:
    """Return the model of a plan, which is the same on all ranks."""
    torch.manual_seed(0)
    return PacedBranches(is_chain=name == "spp")


def batch_of(rows: int) -> runs.Batch:
    """Return an input for each branch, `(rows, WIDTH)`, and targets, `(rows, 1)`."""
    torch.manual_seed(1)
    inputs = tuple(torch.randn(rows, WIDTH) for _ in range(BRANCHES))
    return inputs, torch.randint(WIDTH, (rows, 1))


def measured(name: str, cores: Sequence[int]) -> tuple[str, str]:
    """Return the work of a plan's model, and what it takes on this rank, as JSON."""
    return runs.measure(cores, partial(make_model, name), batch_of(ROWS), [ROWS])


def recorded(
    names: Sequence[str], texts: Sequence[str], cores: Sequence[int], rounds: int
) -> list[list[float]]:
    """Run plans in turns, and return the seconds of their recorded steps."""
    models = [partial(make_model, name) for name in names]
    return runs.record(cores, models, batch_of, texts, rounds)


def plan_of(
    name: PlannerName, work: WorkGraph, costs: MeasuredCosts, count: int
) -> PipelinePlan:
    """Return a plan for a number of microbatches."""
    options = {**runs.OPTIONS, "ranks": RANKS, "microbatches": (count,)}
    return make_plan(work, rows=count * ROWS, costs=costs, planner=name, **options)


def main() -> None:
    """Run the plans for the numbers of microbatches of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # The workers import this file, so its functions must not be those of `__main__`.
    import planner_paced

    from torch_xla_pp.testing import Worlds

    cores = sorted(os.sched_getaffinity(0))
    known = {}
    with Worlds() as worlds:
        for name in PLANS:
            (text, seconds), *_ = worlds.run(
                planner_paced.measured, ranks=RANKS, args=(name, cores), timeout_s=3600
            )
            known[name] = WorkGraph.from_json(text), MeasuredCosts.from_json(seconds)
        cells = [
            {name: plan_of(name, *known[name], count) for name in PLANS}
            for count in options.microbatches
        ]
        names = [name for plans in cells for name in plans]
        texts = [plan.to_json() for plans in cells for plan in plans.values()]
        found, *_ = worlds.run(
            planner_paced.recorded,
            ranks=RANKS,
            args=(names, texts, cores, options.rounds),
            timeout_s=3600,
        )
    for plans in cells:
        own, found = found[: len(plans)], found[len(plans) :]
        for row in runs.compared(MODEL, plans, own, "full"):
            line = json.dumps(row) if options.json else runs.line_of(row)
            print(line, flush=True)


if __name__ == "__main__":
    main()
