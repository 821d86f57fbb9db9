"""How far listed orders are from the best that there are: CP-SAT proves these.

    python -m pip install ortools
    python benchmarks/planner_listed.py
    python benchmarks/planner_listed.py --seconds 300 --json

Cases are small: three or four stages and microbatches, times of 1 to 9 ms drawn at
random, messages of 0 to 2 ms. The model that is solved has what a simulation has: a
rank runs one action at a time, a message leaves at the end of its action, and a stage
holds a microbatch from its F to the end of its B or W. The last stage's forwards take
microbatches in their order, which is only a matter of numbers, and all else may take
them in any. The order that it finds is simulated, and must take as long as it says.

OR-tools is no dependency of the project; version 9.15 was used.

Columns, as the JSON names them:

case: The edges between stages, and the rank of each stage.
microbatches, backward: Their number, and whether backwards are "whole" or "split".
max_live: The most microbatches that a stage may hold.
listed_s: The step with the order of `list_schedule`.
planned_s: The step with the best order that plans are made with, in that memory.
optimum_s: The best step, or the least that it can be if that is not proven.
gap: By which part the planned step is longer.
is_proven: Whether the optimum is proven.
solve_s: Time to find and prove it, on one core.
"""

import argparse
import importlib
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import Any

from torch_xla_pp.errors import ScheduleError
from torch_xla_pp.planner.orders import LIST_RULES, listed_order
from torch_xla_pp.schedule import Action, Schedule, list_schedule, verify
from torch_xla_pp.schedule.action import Kind
from torch_xla_pp.schedule.edges import StagePair
from torch_xla_pp.simulate import (
    Costs,
    Link,
    Network,
    edge_flows,
    stage_seconds,
    step_seconds,
)

# Edges, and the rank of each stage: chains, a V, branches with a join, and a diamond.
GRAPHS: tuple[tuple[tuple[StagePair, ...], tuple[int, ...]], ...] = (
    (((0, 1), (1, 2)), (0, 1, 2)),
    (((0, 1), (1, 2), (2, 3)), (0, 1, 1, 0)),
    (((0, 2), (1, 2)), (0, 1, 2)),
    (((0, 1), (0, 2), (1, 3), (2, 3)), (0, 1, 2, 3)),
    (((0, 2), (1, 2)), (0, 1, 1)),
)
MS = 1e-3


@dataclass(frozen=True, kw_only=True)
class Case:
    """Stages whose actions are to be put in order.

    Args:
        edges: Pairs (producer, consumer).
        placement: Rank of each stage.
        num_microbatches: Number of microbatches.
        is_split: Whether backwards are split.
        max_live: The most microbatches that a stage may hold.
        times_ms: Times of F, I and W of each stage.
        delay_ms: What a message takes to another rank.
    """

    edges: tuple[StagePair, ...]
    placement: tuple[int, ...]
    num_microbatches: int
    is_split: bool
    max_live: int
    times_ms: tuple[tuple[int, int, int], ...]
    delay_ms: int

    @cached_property
    def costs(self) -> Costs:
        """The costs of the stages."""
        times = [(f * MS, i * MS, w * MS) for f, i, w in self.times_ms]
        return Costs(seconds=stage_seconds(times), flows=edge_flows(self.edges, 0))

    @cached_property
    def network(self) -> Network:
        """The links between ranks."""
        return Network(default=Link(latency_s=self.delay_ms * MS))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Return the kinds of actions."""
        return ("F", "I", "W") if self.is_split else ("F", "B")

    def listed(self) -> Schedule:
        """Return the order of `list_schedule`."""
        return list_schedule(
            self.edges,
            dict(enumerate(self.placement)),
            self.num_microbatches,
            self.costs.seconds,
            max_live=self.max_live,
            split_backward=self.is_split,
            delays_s=dict.fromkeys(self.edges, self.delay_ms * MS),
        )

    def planned(self) -> Iterator[Schedule]:
        """Yield the orders that plans are made with, and that keep to the memory."""
        yield self.listed()
        for rule in LIST_RULES:
            found = listed_order(
                rule, self.placement, self.num_microbatches, self.costs, self.network
            )
            if found is not None and rule.is_split == self.is_split:
                order, _ = found
                try:
                    verify(order.schedule, self.edges, max_live=self.max_live)
                except ScheduleError:
                    continue
                yield order.schedule

    def seconds(self, schedule: Schedule) -> float:
        """Return the time of a step."""
        return step_seconds(schedule, self.costs, self.network)


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield so many cases."""
    draw = random.Random(seed)
    variants = itertools.product((False, True), GRAPHS, (2, 1))
    for is_split, (edges, placement), looseness in itertools.islice(variants, count):
        num_microbatches = 3 if is_split and len(placement) > 3 else 4
        yield Case(
            edges=edges,
            placement=placement,
            num_microbatches=num_microbatches,
            is_split=is_split,
            max_live=num_microbatches if looseness > 1 else 2,
            times_ms=tuple(
                (draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 9))
                for _ in placement
            ),
            delay_ms=draw.randint(0, 2),
        )


class Solver:
    """The best orders, with their proof.

    Args:
        seconds: The most time for a case.

    Raises:
        ModuleNotFoundError: OR-tools is not installed.
    """

    def __init__(self, seconds: float) -> None:
        # Its types are not known where it is not installed.
        self._cp_model: Any = importlib.import_module("ortools.sat.python.cp_model")
        self._seconds = seconds

    def best(self, case: Case, most_ms: int) -> tuple[Schedule, int, bool]:
        """Return the best order, the least time of a step in ms, and if it is proven.

        Args:
            case: The case.
            most_ms: The time of a step that is known.

        Raises:
            RuntimeError: It found no order that is as good.
        """
        model = self._cp_model.CpModel()
        spans = _spans(model, case, most_ms)
        _add_waits(model, case, spans)
        _add_limits(model, case, spans, most_ms)
        step = model.new_int_var(0, most_ms, "step")
        for span in spans.values():
            model.add(span.end_expr() <= step)
        model.minimize(step)
        solver = self._cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_time_in_seconds = self._seconds
        status = solver.solve(model)
        if status not in (self._cp_model.OPTIMAL, self._cp_model.FEASIBLE):
            raise RuntimeError(
                f"{case}: expected an order of {most_ms} ms or less, as one is known, "
                f"got {solver.status_name(status)}. Give it more --seconds."
            )
        rows: list[list[Action]] = [[] for _ in set(case.placement)]
        for action in sorted(spans, key=lambda a: solver.value(spans[a].start_expr())):
            rows[case.placement[action.stage]].append(action)
        return (
            Schedule(actions=tuple(map(tuple, rows))),
            round(solver.best_objective_bound),
            status == self._cp_model.OPTIMAL,
        )


def _spans(model: Any, case: Case, most_ms: int) -> dict[Action, Any]:
    """Return the time of each action, as a variable."""
    found = {}
    for stage, (forward, inputs, weights) in enumerate(case.times_ms):
        lengths = {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}
        for kind, number in itertools.product(case.kinds, range(case.num_microbatches)):
            start = model.new_int_var(0, most_ms, "")
            action = Action(stage=stage, kind=kind, microbatch=number)
            found[action] = model.new_fixed_size_interval_var(
                start, lengths[kind], str(action)
            )
    return found


def _add_limits(model: Any, case: Case, spans: dict[Action, Any], most_ms: int) -> None:
    """Let a rank run one action at a time, and a stage hold so many microbatches."""
    for rank in set(case.placement):
        own = [s for a, s in spans.items() if case.placement[a.stage] == rank]
        model.add_no_overlap(own)
    first, *_, last = case.kinds
    for stage in range(len(case.placement)):
        held = []
        for number in range(case.num_microbatches):
            began, ended = (
                spans[Action(stage=stage, kind=kind, microbatch=number)]
                for kind in (first, last)
            )
            length = model.new_int_var(0, most_ms, "")
            span = began.start_expr(), length, ended.end_expr()
            held.append(model.new_interval_var(*span, ""))
        model.add_cumulative(held, [1] * len(held), case.max_live)


def _add_waits(model: Any, case: Case, spans: dict[Action, Any]) -> None:
    """Let actions begin when what they use is there."""
    first, back = case.kinds[:2]
    pairs = []
    for stage in range(len(case.placement)):
        pairs += [(stage, a, stage, b) for a, b in itertools.pairwise(case.kinds)]
    for producer, consumer in case.edges:
        pairs += [(producer, first, consumer, first), (consumer, back, producer, back)]
    for (one, kind, other, then), number in itertools.product(
        pairs, range(case.num_microbatches)
    ):
        before = spans[Action(stage=one, kind=kind, microbatch=number)]
        after = spans[Action(stage=other, kind=then, microbatch=number)]
        is_far = case.placement[one] != case.placement[other]
        delay_ms = case.delay_ms if is_far else 0
        model.add(after.start_expr() >= before.end_expr() + delay_ms)
    last = len(case.placement) - 1
    forwards = [s for a, s in spans.items() if (a.stage, a.kind) == (last, first)]
    for before, after in itertools.pairwise(forwards):
        model.add(after.start_expr() >= before.end_expr())


def row_of(case: Case, solver: Solver) -> dict[str, Any]:
    """Return what a case takes with each order.

    Raises:
        RuntimeError: The best order takes longer in a simulation than was proven, or
            than another one: the models differ.
    """
    listed_s = case.seconds(case.listed())
    planned_s = min(map(case.seconds, case.planned()))
    began_s = time.perf_counter()
    schedule, least_ms, is_proven = solver.best(case, round(planned_s / MS))
    solve_s = time.perf_counter() - began_s
    verify(schedule, case.edges, max_live=case.max_live)
    found_s = case.seconds(schedule)
    if is_proven and abs(found_s - least_ms * MS) > 1e-9:
        raise RuntimeError(
            f"{case}: expected a step of {least_ms} ms, as proven, got {found_s / MS} "
            "ms in the simulation. Correct the model."
        )
    edges = " ".join(f"{a}-{b}" for a, b in case.edges)
    return {
        "case": f"{edges} on {' '.join(map(str, case.placement))}",
        "microbatches": case.num_microbatches,
        "backward": "split" if case.is_split else "whole",
        "max_live": case.max_live,
        "listed_s": listed_s,
        "planned_s": planned_s,
        "optimum_s": least_ms * MS,
        "gap": planned_s / (least_ms * MS) - 1,
        "is_proven": is_proven,
        "solve_s": solve_s,
    }


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    proof = f"proven in {row['solve_s']:5.1f} s" if row["is_proven"] else "not proven"
    return (
        f"{row['case']:30} M={row['microbatches']} {row['backward']}"
        f" live {row['max_live']}  listed {1e3 * row['listed_s']:4.0f} ms"
        f"  planned {1e3 * row['planned_s']:4.0f}  best {1e3 * row['optimum_s']:4.0f}"
        f"  gap {100 * row['gap']:4.1f} %  {proof}"
    )


def main() -> None:
    """Solve the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        solver = Solver(options.seconds)
    except ModuleNotFoundError as error:
        sys.exit(f"{error}: install OR-tools with python -m pip install ortools.")
    rows = []
    for case in cases(options.cases, options.seed):
        rows.append(row_of(case, solver))
        print(json.dumps(rows[-1]) if options.json else line_of(rows[-1]), flush=True)
    gaps = [row["gap"] for row in rows]
    summary = {
        "cases": len(rows),
        "proven": sum(row["is_proven"] for row in rows),
        "optimal": sum(gap < 1e-9 for gap in gaps),
        "mean_gap": mean(gaps),
        "worst_gap": max(gaps),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
