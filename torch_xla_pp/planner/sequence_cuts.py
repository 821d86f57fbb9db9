"""Cuts for ranks that differ: runs of orders of works, and the ranks that have them.

A *sequence* of ranks has the rank that comes first in the pipeline, second, and so on.
As each rank takes another time for the same works, and holds another number of bytes,
the recurrence of `runs_search` takes the times of the rank of each stage.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from torch_xla_pp.planner.evaluation import Cut, Evaluator, Setting
from torch_xla_pp.planner.linear_orders import Order
from torch_xla_pp.planner.orders import SPLIT
from torch_xla_pp.planner.runs_search import (
    Choice,
    Division,
    OrderRuns,
    RunTables,
    division_of,
    with_stage,
)
from torch_xla_pp.planner.work_costs import Array, WorkCosts

_MOST_SEQUENCES = 24


class _Place(NamedTuple):
    """The place of a stage in a sequence.

    Args:
        tables: What runs of works take on its rank.
        live: Its live microbatches.
        capacity: Bytes that it may hold.
        is_least: Whether to minimise the share of these bytes in place of time.
    """

    tables: RunTables
    live: float
    capacity: float
    is_least: bool


def sequences_of(evaluator: Evaluator, setting: Setting) -> list[tuple[int, ...]]:
    """Return the sequences of ranks to try, that of their numbers first.

    These are all that differ, if they are few; else those by speed, and one in which
    the next rank is the one with the fastest link.

    Args:
        evaluator: Evaluates cuts.
        setting: A setting for ranks that differ.
    """
    links = evaluator.cluster.network.links
    works = evaluator.works_of_ranks(setting)
    kinds = [rank if links else own for rank, own in enumerate(works)]
    found = [*islice(_distinct(kinds), _MOST_SEQUENCES + 1)]
    if len(found) <= _MOST_SEQUENCES:
        return found
    seconds = [float(np.sum(own.seconds)) for own in works]
    by_speed = sorted(range(len(works)), key=lambda rank: seconds[rank])
    some = [tuple(range(len(works))), tuple(by_speed), tuple(reversed(by_speed))]
    some += [_nearest(evaluator, len(works))] if links else []
    return [*dict.fromkeys(some)]


def _distinct(kinds: Sequence[object]) -> Iterator[tuple[int, ...]]:
    """Yield sequences of ranks, those in which equal ranks exchange places once."""

    def grown(left: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not left:
            yield ()
        firsts = {kinds[rank]: rank for rank in reversed(left)}
        for first in sorted(firsts.values()):
            for rest in grown(tuple(rank for rank in left if rank != first)):
                yield (first, *rest)

    return grown(tuple(range(len(kinds))))


def _nearest(evaluator: Evaluator, num_ranks: int) -> tuple[int, ...]:
    """Return a sequence that begins with rank 0 and takes the fastest link next."""
    network = evaluator.cluster.network
    found, left = [0], [*range(1, num_ranks)]
    while left:
        links = {rank: network.link(found[-1], rank) for rank in left}
        found.append(
            min(left, key=lambda r: (-links[r].bytes_per_s, links[r].latency_s, r))
        )
        left.remove(found[-1])
    return tuple(found)


def balanced_on_ranks(evaluator: Evaluator, setting: Setting) -> float:
    """Estimate a step of stages that all take equally long, on ranks that differ.

    Args:
        evaluator: Evaluates cuts.
        setting: A setting for ranks that differ.
    """
    works = evaluator.works_of_ranks(setting)
    totals = np.array([np.sum(own.seconds) for own in works])
    if not totals.all():
        return 0.0
    load = 1 / (1 / totals).sum()
    paths = [own.longest_path_s(False) for own in works]
    path = load * len(works) * np.mean(paths / totals)
    fill = max(0.0, path - load) * (1 - 1 / len(works))
    if setting.schedule in SPLIT:
        late = np.mean([own.seconds[2].sum() for own in works] / totals)
        fill *= max(0.0, 1 - 2 * late)
    if setting.schedule == "zbv":
        fill /= 2
    actions = [own.cluster.device.action_s for own in works]
    ends = [own.final_s(setting.replicas).sum() for own in works]
    once = 2 * setting.stages_per_rank * min(actions)
    last = max(load / totals * ends)
    return float(
        setting.num_microbatches * (load + once) + fill / setting.stages_per_rank + last
    )


class SequenceCuts:
    """A maker of cuts for one setting after another, which caches what they share.

    Args:
        evaluator: Evaluates cuts.
        remat: Which of "none" and "full" are allowed.
        runs_of: Returns the runs of an order.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        remat: Sequence[str],
        runs_of: Callable[[Order], OrderRuns],
    ) -> None:
        self._evaluator = evaluator
        self._remat = remat
        self._runs_of = runs_of
        self._tables: dict[tuple[WorkCosts, Order], RunTables] = {}
        self._found: dict[tuple[_Place, ...], Division | None] = {}
        self._rooms: dict[tuple[RunTables, float, float], bool] = {}

    def given(self, setting: Setting, stages: tuple[int, ...]) -> Iterator[Cut]:
        """Yield the given stages on all sequences of ranks."""
        for sequence in sequences_of(self._evaluator, setting):
            for choice in self._remat:
                yield Cut(
                    setting=setting,
                    stages=stages,
                    remat=(choice,) * setting.num_stages,
                    placement=_placement(setting, sequence),
                )

    def cuts(
        self,
        setting: Setting,
        lives: Sequence[float],
        orders: Sequence[Order],
        *,
        has_least: bool,
    ) -> Iterator[Cut]:
        """Yield cuts that may be good for a setting.

        Args:
            setting: A setting for ranks that differ.
            lives: The live microbatches with 1, 2, … stages to the end.
            orders: Orders of works.
            has_least: Whether also to yield cuts that hold least, if memory is short.
        """
        seen = set()
        sequences = sequences_of(self._evaluator, setting)
        for order in orders:
            recurrence = _Recurrence(order)
            for sequence in sequences:
                placement = _placement(setting, sequence)
                places = self._places(setting, placement, lives, order)
                found = [self._division(recurrence, places)]
                if has_least and any(np.isfinite(place.capacity) for place in places):
                    least = self._least_places(setting, placement, lives, places)
                    found.append(self._division(recurrence, least))
                for division in found:
                    if division is None:
                        continue
                    cut = Cut(
                        setting=setting,
                        stages=division.stages,
                        remat=division.remat,
                        placement=placement,
                    )
                    if cut not in seen:
                        seen.add(cut)
                        yield cut

    def _places(
        self,
        setting: Setting,
        placement: tuple[int, ...],
        lives: Sequence[float],
        order: Order,
    ) -> tuple["_Place", ...]:
        """Return what stages take and may hold, that of the last stage first."""
        works = self._evaluator.works_of_ranks(setting)
        capacities = self._evaluator.capacities(setting.num_ranks)
        found = []
        for live, rank in zip(lives, reversed(placement), strict=True):
            tables = self._tables_of(works[rank], order)
            capacity = capacities[rank] / setting.stages_per_rank
            if self._fits(tables, max(lives), capacity):
                # Any run fits, so that live microbatches do not matter.
                live, capacity = 1.0, np.inf
            found.append(_Place(tables, live, capacity, False))
        return tuple(found)

    def _least_places(
        self,
        setting: Setting,
        placement: tuple[int, ...],
        lives: Sequence[float],
        places: Sequence["_Place"],
    ) -> tuple["_Place", ...]:
        """Return the same places, with the share of memory in place of time."""
        capacities = self._evaluator.capacities(setting.num_ranks)
        ranks = reversed(placement)
        return tuple(
            _Place(place.tables, live, float(capacities[rank]), True)
            for place, live, rank in zip(places, lives, ranks, strict=True)
        )

    def _division(
        self, recurrence: "_Recurrence", places: tuple["_Place", ...]
    ) -> Division | None:
        if places not in self._found:
            self._found[places] = recurrence.division(places)
        return self._found[places]

    def _fits(self, tables: RunTables, live: float, capacity: float) -> bool:
        key = tables, live, capacity
        if key not in self._rooms:
            self._rooms[key] = tables.fits(live, capacity)
        return self._rooms[key]

    def _tables_of(self, works: WorkCosts, order: Order) -> RunTables:
        key = works, order
        if key not in self._tables:
            self._tables[key] = RunTables(self._runs_of(order), works, self._remat)
        return self._tables[key]


class _Recurrence:
    """The recurrence over one order, which shares the last stages of sequences."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._costs: dict[_Place, tuple[Array, Array]] = {}
        ends = np.full(len(order) + 1, np.inf)
        ends[-1] = 0.0
        self._known: dict[tuple[_Place, ...], tuple[Array, tuple[Choice, ...]]] = {
            (): (ends, ())
        }

    def division(self, places: Sequence[_Place]) -> Division | None:
        """Return the runs with the least bottleneck, None if none fit.

        Args:
            places: The places of the last stage, the one before, and so on.
        """
        key: tuple[_Place, ...] = ()
        for place in places:
            rests, choices = self._known[key]
            key = (*key, place)
            if key not in self._known:
                times, again = self._costs_of(place)
                rests, ends = with_stage(times, rests, place.tables.scratch)
                own = ends, again[np.arange(len(ends)), ends]
                self._known[key] = rests, (own, *choices)
        rests, choices = self._known[key]
        if rests[0] == np.inf:
            return None
        return division_of(self._order, float(rests[0]), choices)

    def _costs_of(self, place: _Place) -> tuple[Array, Array]:
        if place not in self._costs:
            tables, live, capacity, is_least = place
            if is_least:
                sizes, again = tables.sizes(live)
                self._costs[place] = sizes / capacity, again
            else:
                self._costs[place] = tables.times(live, capacity)
        return self._costs[place]


def _placement(setting: Setting, sequence: tuple[int, ...]) -> tuple[int, ...]:
    """Return the rank of each stage."""
    return tuple(sequence[rank] for rank in setting.usual_ranks)
