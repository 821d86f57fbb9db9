"""The order of actions that a plan names, and its live microbatches."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, inf
from typing import NamedTuple

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
from torch_xla_pp.simulate import (
    Costs,
    Network,
    Routes,
    StepOrder,
    listed_step,
    step_seconds,
)

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
    rows = []
    for stage, depth in enumerate(_depths(edges, num_ranks)):
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
# Its orders are made for each plan, and written out in it.
LISTED = "list"
SCHEDULES = (*_BUILDERS, LISTED)
# These have several stages on a rank.
MULTI = ("interleaved", "zbv")
# In these, W may wait while other actions run.
SPLIT = ("zb1p", "zbv", LISTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderRule:
    """One way to make an order that is listed in a plan.

    Args:
        builder: "list" for `list_schedule`, or a builder for a stage on each rank.
        is_split: Whether backwards are split.
        live: The most live microbatches of a stage, as a multiple of its depth, or of
            the greatest depth if backwards are split.
        most_waiting: See `list_schedule`.
    """

    builder: str = LISTED
    is_split: bool = True
    live: float = 1.0
    most_waiting: int | None = None


# The rule that is best most often, cheap ones, and others.
LIST_RULES = (
    OrderRule(live=2.0),
    OrderRule(builder="zb1p"),
    OrderRule(builder="dag", is_split=False),
    OrderRule(builder="1f1b", is_split=False),
    OrderRule(live=1.0),
    OrderRule(is_split=False, live=1.0),
    OrderRule(live=1.5),
    OrderRule(is_split=False, live=2.0),
    OrderRule(live=1.0, most_waiting=2),
    OrderRule(live=1.5, most_waiting=2),
    OrderRule(live=3.0),
    OrderRule(is_split=False, live=1.5),
    OrderRule(is_split=False, live=0.5),
)
FEWEST_RULES = 5


@dataclass(frozen=True, eq=False)
class PlannedOrder(StepOrder):
    """The order of a plan's actions, and the most live microbatches at a time."""

    @cached_property
    def live_rows(self) -> tuple["LiveRow", ...]:
        """For each rank its stages, and the live microbatches of each over time.

        That is for each time and stage the microbatches from F to B or I, those from I
        to W, and those that are both, as the I runs: three arrays (times, stages).
        Times that another one exceeds are left out where there is one stage.
        """
        return tuple(_live_row(row) for row in self.schedule.actions)

    @cached_property
    def live_table(self) -> "LiveTable":
        """The same for all ranks at once."""
        rows = self.live_rows
        num_stages = max(len(row.stages) for row in rows)
        shape = len(rows), max(len(row.live) for row in rows), num_stages
        stages, has = np.zeros((len(rows), num_stages), int), np.zeros(shape[::2], bool)
        counts = np.zeros((3, *shape), int)
        for rank, row in enumerate(rows):
            own = len(row.stages)
            stages[rank, :own], has[rank, :own] = row.stages, True
            counts[:, rank, : len(row.live), :own] = row[1:]
        return LiveTable(stages, has, *counts)


class LiveRow(NamedTuple):
    """The stages of a rank and their live microbatches, see `LiveTable`."""

    stages: NDArray[np.int_]
    live: NDArray[np.int_]
    waiting: NDArray[np.int_]
    both: NDArray[np.int_]


class LiveTable(NamedTuple):
    """The stages of all ranks, and their live microbatches, filled up to equal counts.

    Args:
        stages: Each rank's stages, 0 where it has no more: (ranks, stages).
        has: Whether it has: (ranks, stages).
        live: Microbatches from F to B or I: (ranks, times, stages).
        waiting: Those from I to W, likewise.
        both: Those that count in both, as their I runs.
    """

    stages: NDArray[np.int_]
    has: NDArray[np.bool_]
    live: NDArray[np.int_]
    waiting: NDArray[np.int_]
    both: NDArray[np.int_]


@lru_cache(maxsize=256)
def planned_order(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    per_rank: int,
    edges: Edges,
    sequence: tuple[int, ...] = (),
) -> PlannedOrder:
    """Return the order that a name stands for.

    Args:
        name: One of `SCHEDULES` but "list".
        num_ranks: Number of ranks.
        num_microbatches: Number of microbatches.
        per_rank: Stages on each rank.
        edges: Edges of the stages if the name is "dag", else nothing.
        sequence: The rank that runs what rank 0, 1, … would; () for these themselves.

    Raises:
        ValueError: The name is unknown, or the schedule does not take these counts.
    """
    if name not in _BUILDERS:
        raise ValueError(
            f"schedule: expected one of {', '.join(_BUILDERS)}, got {name!r}. Name one."
        )
    schedule = _BUILDERS[name](num_ranks, num_microbatches, per_rank, edges)
    if sequence:
        rows = dict(zip(sequence, schedule.actions, strict=True))
        own = tuple(rows[rank] for rank in range(num_ranks))
        schedule = Schedule(actions=own)
    return PlannedOrder(schedule=schedule)


def sequence_of(
    placement: tuple[int, ...], usual: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the rank that has the stages of rank 0, 1, …, None if none has just these.

    Args:
        placement: Rank of each stage.
        usual: The same as `usual_placement` has it.
    """
    found = dict(zip(usual, placement, strict=True))
    ranks = tuple(found[rank] for rank in sorted(found))
    is_whole = sorted(ranks) == sorted(found)
    is_same = all(found[u] == p for u, p in zip(usual, placement, strict=True))
    return ranks if is_whole and is_same else None


def usual_placement(name: str, num_ranks: int, per_rank: int) -> tuple[int, ...]:
    """Return the rank of each stage if a plan does not say it.

    Args:
        name: One of `SCHEDULES`.
        num_ranks: Number of ranks.
        per_rank: Stages on each rank.
    """
    stages = range(num_ranks * per_rank)
    if name == "zbv":
        return tuple(min(s, 2 * num_ranks - 1 - s) for s in stages)
    return tuple(s % num_ranks for s in stages)


def listed_order(
    rule: OrderRule,
    placement: tuple[int, ...],
    num_microbatches: int,
    costs: Costs,
    network: Network,
    *,
    routes: Routes | None = None,
    has_sequences: bool = False,
    limit_s: float = inf,
) -> tuple[PlannedOrder, float] | None:
    """Return an order for what stages cost, and the time of a step with it.

    Args:
        rule: How to make it.
        placement: Rank of each stage.
        num_microbatches: Number of microbatches.
        costs: The costs of stages.
        network: The links between ranks.
        routes: The routes of the costs' messages, if they are known.
        has_sequences: Whether builders may have other ranks in place of 0, 1, …
        limit_s: What a step may take.

    Returns:
        The order and the time; None if that is longer than the limit, or the rule is
        not for such stages.
    """
    edges, num_ranks = costs.edges, 1 + max(placement)
    if rule.builder != LISTED:
        is_usual = placement == tuple(range(num_ranks))
        is_known = is_usual or (has_sequences and len(placement) == num_ranks)
        if not is_known or not takes(rule.builder, num_ranks, num_microbatches):
            return None
        own = edges if rule.builder == "dag" else ()
        sequence = () if is_usual else placement
        order = planned_order(
            rule.builder, num_ranks, num_microbatches, 1, own, sequence
        )
        step_s = step_seconds(order, costs, network, routes=routes, limit_s=limit_s)
        return (order, step_s) if step_s <= limit_s else None
    depths = _depths(edges, len(placement))
    if rule.is_split:
        depths = [max(depths)] * len(depths)
    found = listed_step(
        costs,
        placement,
        num_microbatches,
        network,
        [max(1, ceil(rule.live * depth)) for depth in depths],
        split_backward=rule.is_split,
        most_waiting=rule.most_waiting,
        routes=routes,
        limit_s=limit_s,
    )
    return None if found is None else (PlannedOrder(schedule=found[0]), found[1])


def takes(name: str, num_ranks: int, num_microbatches: int) -> bool:
    """Return whether a builder accepts so many microbatches."""
    if name in ("interleaved", "zb1p"):
        return not num_microbatches % max(1, num_microbatches // num_ranks)
    return name != "zbv" or num_microbatches >= 2 * num_ranks - 1


def _depths(edges: Edges, num_stages: int) -> list[int]:
    """Return the number of stages on the longest path from each stage to an end."""
    depths = [1] * num_stages
    for producer, consumer in sorted(edges, reverse=True):
        depths[producer] = max(depths[producer], 1 + depths[consumer])
    return depths


def _live_row(row: tuple[Action, ...]) -> LiveRow:
    stages = tuple(sorted({action.stage for action in row}))
    places = {stage: place for place, stage in enumerate(stages)}
    live, waiting, both = ([0] * len(stages) for _ in range(3))
    found: set[tuple[int, ...]] = set()
    grew = False
    for action in row:
        kind, place = action.kind, places[action.stage]
        if grew and kind != "F":
            # A maximum is reached only before something is subtracted.
            found.add((*live, *waiting, *both))
        grew = kind == "F"
        if kind == "F":
            live[place] += 1
        elif kind == "W":
            waiting[place] -= 1
        elif kind == "B":
            live[place] -= 1
        else:
            waiting[place] += 1
            both[place] = 1
            found.add((*live, *waiting, *both))
            both[place] = 0
            live[place] -= 1
    if len(stages) == 1:
        found = {*_largest(found)}
    times = np.array(sorted(found), dtype=int).reshape(-1, 3, len(stages))
    return LiveRow(np.array(stages), *times.swapaxes(0, 1))


def _largest(times: Iterable[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield the times of a stage, but for those that another one exceeds."""
    most = [-1, -1]
    for time in sorted(times, key=lambda time: (-time[0], -time[1], time[2])):
        _, waiting, both = time
        if waiting > max(most[: both + 1]):
            most[both] = waiting
            yield time
