"""Orders of works in a line, from which stages are cut as runs.

Whatever the order, only edges that are there bind the execution. An order that takes
branches one after another makes stages of branches, one that takes them in turn makes
stages across them.
"""

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from torch_xla_pp.planner.work_costs import Array

Order = tuple[int, ...]


def linear_orders(
    edges: Sequence[tuple[int, int]], weights: Sequence[float]
) -> tuple[Order, ...]:
    """Return different orders that keep the edges, that of the program first.

    Args:
        edges: Pairs (producer, consumer) of works in program order.
        weights: What each work takes.
    """
    count = len(weights)
    levels, rests = [0] * count, list(weights)
    for producer, consumer in sorted(edges, key=lambda edge: edge[1]):
        levels[consumer] = max(levels[consumer], levels[producer] + 1)
    for producer, consumer in sorted(edges, reverse=True):
        rests[producer] = max(rests[producer], weights[producer] + rests[consumer])
    found = [
        tuple(range(count)),
        _depth_first(edges, count),
        _by_priority(edges, count, lambda work: (levels[work], work)),
        _by_priority(edges, count, lambda work: (-rests[work], work)),
        _by_priority(edges, count, lambda work: (rests[work], work)),
    ]
    return tuple(dict.fromkeys(found))


def _by_priority(
    edges: Sequence[tuple[int, int]],
    count: int,
    priority: Callable[[int], tuple[float, int]],
) -> Order:
    """Take of the works that may come next the one with the least priority."""
    users, needs = _neighbours(edges, count)
    free = [(priority(work), work) for work in range(count) if not needs[work]]
    heapq.heapify(free)
    found = []
    while free:
        _, work = heapq.heappop(free)
        found.append(work)
        for user in users[work]:
            needs[user] -= 1
            if not needs[user]:
                heapq.heappush(free, (priority(user), user))
    return tuple(found)


def _depth_first(edges: Sequence[tuple[int, int]], count: int) -> Order:
    """Go on with what the last work made possible."""
    users, needs = _neighbours(edges, count)
    free = [work for work in reversed(range(count)) if not needs[work]]
    found = []
    while free:
        work = free.pop()
        found.append(work)
        for user in reversed(users[work]):
            needs[user] -= 1
            if not needs[user]:
                free.append(user)
    return tuple(found)


def _neighbours(
    edges: Sequence[tuple[int, int]], count: int
) -> tuple[list[list[int]], list[int]]:
    users: list[list[int]] = [[] for _ in range(count)]
    needs = [0] * count
    for producer, consumer in edges:
        users[producer].append(consumer)
        needs[consumer] += 1
    return users, needs


class RunSums:
    """Sums over all runs of an order: tables with a line for the first work.

    Args:
        order: The works in their order.
    """

    def __init__(self, order: Order) -> None:
        self._order = np.array(order)
        self._count = len(order)
        self._places = np.empty(self._count, dtype=int)
        self._places[self._order] = np.arange(self._count)

    def sums(self, per_work: Array) -> Array:
        """Return the sum over the works of each run."""
        ends = np.concatenate(([0.0], np.cumsum(per_work[self._order])))
        found: Array = ends[None, 1:] - ends[:-1, None]
        return found

    def holding(self, groups: Sequence[Sequence[int]], sizes: Array) -> Array:
        """Return for each run the sizes of the groups that have a member in it."""
        corners = self._corners()
        for members, size in zip(groups, sizes, strict=True):
            before = -1
            for place in sorted({int(self._places[work]) for work in members}):
                corners.add(before + 1, place, place, size)
                before = place
        return corners.table()

    def entering(
        self, producers: Sequence[int], users: Sequence[Sequence[int]], sizes: Array
    ) -> Array:
        """Return the sizes of the values that each run uses and does not make."""
        corners = self._corners()
        for producer, members, size in zip(producers, users, sizes, strict=True):
            before = -1 if producer < 0 else int(self._places[producer])
            for place in sorted({int(self._places[work]) for work in members}):
                corners.add(before + 1, place, place, size)
                before = place
        return corners.table()

    def _corners(self) -> "_Corners":
        return _Corners(self._count)


class _Corners:
    """Sums of rectangles in a table of runs, of which only corners are noted."""

    def __init__(self, count: int) -> None:
        self._table = np.zeros((count + 1, count + 1))

    def add(self, first: int, last: int, end: int, size: float) -> None:
        """Add to all runs that begin at `first` to `last` and end at `end` or later."""
        self._table[first, end] += size
        self._table[last + 1, end] -= size

    def table(self) -> Array:
        """Return the sums."""
        found: Array = self._table.cumsum(0).cumsum(1)[:-1, :-1]
        return found
