"""Orders of works in a line, from which stages are cut as runs.

Whatever the order, only the edges of the model constrain the execution. An order with
branches one after another gives stages of branches, one that alternates between them
gives stages across branches.
"""

import heapq
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from torch_xla_pp.planner.work_costs import Array

Order = tuple[int, ...]


def linear_orders(
    edges: Sequence[tuple[int, int]], weights: Sequence[float]
) -> tuple[Order, ...]:
    """Return different orders that keep the edges, that of the program first.

    Args:
        edges: Pairs (producer, consumer) of works in program order.
        weights: The time of each work.
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
    """Order works: of those that may come next, the one with the least priority."""
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
    """Order works: next is a work that the last one has enabled, if there is one."""
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
    """Sums over all runs of an order, as tables with a row for each first work.

    Args:
        order: The works in their order.
    """

    def __init__(self, order: Order) -> None:
        self._order = np.array(order)
        self._count = len(order)
        self._places = [0] * self._count
        for place, work in enumerate(order):
            self._places[work] = place

    def sums(self, per_work: Array) -> Array:
        """Return the sum over the works of each run."""
        ends = np.concatenate(([0.0], np.cumsum(per_work[self._order])))
        found: Array = ends[None, 1:] - ends[:-1, None]
        return found

    def keeping(
        self,
        keepers: Sequence[Sequence[int]],
        producers: Sequence[int],
        wholes: Sequence[int],
    ) -> "RunCounts":
        """Return for each run the values that it keeps, those with views of them once.

        A run that makes a view keeps what it is a view of.

        Args:
            keepers: The works that keep each value.
            producers: The work that makes each value, -1 for none.
            wholes: The value that each value is a view of, -1 for none.
        """
        members: list[list[tuple[int, int]]] = [[] for _ in keepers]
        befores = [-1] * len(keepers)
        for number, works in enumerate(keepers):
            kept, last = number, self._count
            while True:
                places = (self._places[work] for work in works)
                members[kept] += [(place, min(place, last)) for place in places]
                if wholes[kept] < 0:
                    break
                # Runs that begin later get the view from another stage.
                last = befores[kept] = self._places[producers[kept]]
                kept = wholes[kept]
        return self._counts(befores, members)

    def entering(
        self, producers: Sequence[int], users: Sequence[Sequence[int]]
    ) -> "RunCounts":
        """Return for each run the values that it uses and does not make.

        Args:
            producers: The work that makes each value, -1 for none.
            users: The works that use each value.
        """
        befores = [-1 if work < 0 else self._places[work] for work in producers]
        members = [[(self._places[work],) * 2 for work in works] for works in users]
        return self._counts(befores, members)

    def _counts(
        self,
        befores: Sequence[int],
        members: Sequence[Sequence[tuple[int, int]]],
    ) -> "RunCounts":
        """Return for each run the values of which it has a member.

        Args:
            befores: For each value, the place after which its runs begin.
            members: For each value, places in a run, and the last beginnings of runs
                in which each of these counts.
        """
        corners: list[tuple[int, int, int, int]] = []
        for number, places in enumerate(members):
            before = befores[number]
            for place, last in sorted(places):
                if last > before:
                    corners.append((before + 1, last + 1, place, number))
                    before = last
        return RunCounts(self._count, np.array(corners, dtype=int).reshape(-1, 4))


class RunCounts:
    """The values that count for each run, as corners of rectangles.

    Args:
        count: Number of works.
        corners: First line, line after the last one, first column, number of a value.
    """

    def __init__(self, count: int, corners: NDArray[np.int_]) -> None:
        self._count = count
        self._corners = corners

    def sums(self, sizes: Array) -> Array:
        """Return for each run the sum of the sizes of the values that count."""
        table = np.zeros((self._count + 1, self._count + 1))
        firsts, afters, columns, numbers = self._corners.T
        np.add.at(table, (firsts, columns), sizes[numbers])
        np.add.at(table, (afters, columns), -sizes[numbers])
        found: Array = table.cumsum(0).cumsum(1)[:-1, :-1]
        return found
