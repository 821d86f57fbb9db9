"""The order of actions that a plan names, and the microbatches that it holds live."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from torch_xla_pp.schedule import (
    Action,
    Schedule,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zb1p,
    zbv,
)
from torch_xla_pp.simulate import StepOrder

Edges = tuple[tuple[int, int], ...]


def branches_1f1b(num_ranks: int, num_microbatches: int, edges: Edges) -> Schedule:
    """Return `dag_1f1b` of one stage on each rank, without its simulation.

    A stage runs as many forwards as there are stages below it on the longest path to
    an end, then a forward and a backward in turn.

    Args:
        num_ranks: Number of ranks.
        num_microbatches: Number of microbatches.
        edges: Pairs (producer, consumer) of stages.
    """
    depths = [1] * num_ranks
    for producer, consumer in sorted(edges, reverse=True):
        depths[producer] = max(depths[producer], 1 + depths[consumer])
    rows = []
    for stage, depth in enumerate(depths):
        ahead = min(depth - 1, num_microbatches)
        row = [Action(stage=stage, kind="F", microbatch=mb) for mb in range(ahead)]
        for mb in range(num_microbatches):
            if ahead + mb < num_microbatches:
                row.append(Action(stage=stage, kind="F", microbatch=ahead + mb))
            row.append(Action(stage=stage, kind="B", microbatch=mb))
        rows.append(tuple(row))
    return Schedule(actions=tuple(rows))


# Number of ranks, of microbatches, of stages on a rank, and edges → schedule.
_BUILDERS: Mapping[str, Callable[[int, int, int, Edges], Schedule]] = {
    "1f1b": lambda p, m, v, e: one_f_one_b(p, m),
    "zb1p": lambda p, m, v, e: zb1p(p, m, v),
    "dag": lambda p, m, v, e: branches_1f1b(p, m, e),
    "gpipe": lambda p, m, v, e: gpipe(p, m),
    "interleaved": lambda p, m, v, e: interleaved_1f1b(p, m, v),
    "zbv": lambda p, m, v, e: zbv(p, m),
}
SCHEDULES = tuple(_BUILDERS)
# These have several stages on a rank.
MULTI = ("interleaved", "zbv")
SPLIT = ("zb1p", "zbv")


@dataclass(frozen=True, eq=False)
class PlannedOrder(StepOrder):
    """The order of a plan's actions, with the most that is live at a time."""

    @cached_property
    def live_rows(self) -> tuple[tuple[tuple[int, ...], NDArray[np.float64]], ...]:
        """For each rank its stages, and what is live at some time in each of them.

        A line has first for each stage the microbatches from F to B or W, then for
        each stage those from I to W. Lines that another one exceeds are left out where
        there is one stage.
        """
        return tuple(_live_rows(row) for row in self.schedule.actions)


@lru_cache(maxsize=256)
def planned_order(
    name: str, num_ranks: int, num_microbatches: int, per_rank: int, edges: Edges
) -> PlannedOrder:
    """Return the order that a name stands for.

    Args:
        name: One of `SCHEDULES`.
        num_ranks: Number of ranks.
        num_microbatches: Number of microbatches.
        per_rank: Stages on each rank.
        edges: Edges of the stages if the name is "dag", else nothing.

    Raises:
        ValueError: The name is unknown, or the schedule does not take these counts.
    """
    if name not in _BUILDERS:
        raise ValueError(
            f"schedule: expected one of {', '.join(SCHEDULES)}, got {name!r}. Name one."
        )
    build = _BUILDERS[name]
    return PlannedOrder(schedule=build(num_ranks, num_microbatches, per_rank, edges))


def _live_rows(row: tuple[Action, ...]) -> tuple[tuple[int, ...], NDArray[np.float64]]:
    stages = tuple(sorted({action.stage for action in row}))
    live: Counter[int] = Counter()
    passed: Counter[int] = Counter()
    found = set()
    for action in row:
        live[action.stage] += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
        passed[action.stage] += {"F": 0, "I": 1, "B": 0, "W": -1}[action.kind]
        found.add((*(live[s] for s in stages), *(passed[s] for s in stages)))
    if len(stages) == 1:
        found = {
            a
            for a in found
            if not any(b != a and b[0] >= a[0] and b[1] >= a[1] for b in found)
        }
    return stages, np.array(sorted(found), dtype=float)
