"""Stages as runs of one order of works, with the least bottleneck.

The bottleneck is the longest time of a stage for a microbatch, or of one of its
messages on a link. The number of stages from one to the end bounds its microbatches in
flight, as in 1F1B of a chain; a plan whose stages are parallel branches holds fewer.

Source: the recurrence is PipeDream's (Narayanan et al., "PipeDream: Generalized
Pipeline Parallelism for DNN Training", SOSP 2019) without replicas of a stage; live
microbatches are those of 1F1B with flushes (Narayanan et al., "Memory-Efficient
Pipeline-Parallel DNN Training", ICML 2021). The bound on memory inside it is ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_xla_pp.planner.linear_orders import Order, RunSums
from torch_xla_pp.planner.work_costs import Array, WorkCosts, WorkTable

_LINES = 64

# Where a stage ends and whether it computes again, if it begins at each place.
Choice = tuple[NDArray[np.int_], Array]


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """A cut of an order.

    Args:
        bottleneck_s: The longest time of a stage.
        stages: Stage of each work.
        remat: "none" or "full" for each stage.
    """

    bottleneck_s: float
    stages: tuple[int, ...]
    remat: tuple[str, ...]


class OrderRuns:
    """The bytes of an order's runs, which do not depend on the times of works.

    Args:
        order: The works in their order.
        table: The works.
    """

    def __init__(self, order: Order, table: WorkTable) -> None:
        self.order = order
        self.runs = RunSums(order)
        self.kept = self.runs.keeping(
            table.keepers, table.producers, table.wholes.tolist()
        )
        self.entering = self.runs.entering(table.producers, table.users)


class RunTables:
    """The time and the bytes of each run of an order as a stage.

    Args:
        order: The order and its runs.
        works: The costs of works.
        remat: Which of "none" and "full" are allowed.
    """

    def __init__(
        self, order: OrderRuns, works: WorkCosts, remat: Sequence[str]
    ) -> None:
        runs = order.runs
        forward, inputs, weights = works.seconds
        device, link = works.cluster.device, works.cluster.network.default
        entering = order.entering.sums(works.message_bytes)
        base = runs.sums(forward + inputs + weights) + 2 * device.action_s
        base = np.maximum(base, entering / link.bytes_per_s)
        self.order = order.order
        self.remat = tuple(remat)
        self.loads = {"none": base, "full": base + runs.sums(forward)}
        self.state = runs.sums(works.parameter_bytes * (2 + works.optimizer_bytes))
        own = {name: runs.sums(held) for name, held in works.saved.items()}
        self.saved = {
            "none": own["none"] + order.kept.sums(works.inner_bytes),
            "full": own["full"] + order.entering.sums(works.value_bytes),
        }
        # For `RunCuts`, which would otherwise allocate it for every stage.
        self.scratch = np.empty(base.shape)
        # No run ends before it begins.
        below = np.tril(np.ones(base.shape, dtype=bool), -1)
        for load in self.loads.values():
            load[below] = np.inf

    def times(self, live: float, capacity: float) -> tuple[Array, Array]:
        """Return the time of each run if it fits, and whether it computes again.

        Args:
            live: Microbatches in flight.
            capacity: Bytes that a stage may hold.
        """
        found = np.full(self.state.shape, np.inf)
        again = np.zeros(self.state.shape, dtype=bool)
        for remat in sorted(self.remat):
            fits = self.state + live * self.saved[remat] <= capacity
            better = fits & (self.loads[remat] < found)
            found = np.where(better, self.loads[remat], found)
            again = np.where(better, remat == "full", again)
        return found, again

    @property
    def fastest(self) -> str:
        """The remat that takes least time."""
        return "none" if "none" in self.remat else "full"

    def fits(self, live: float, capacity: float) -> bool:
        """Return whether every run fits with the remat that takes least time."""
        held = self.state + live * self.saved[self.fastest]
        return bool(held.max() <= capacity)

    def fits_run(self, first: int, last: int, live: float, capacity: float) -> bool:
        """Return the same of one run."""
        saved = self.saved[self.fastest][first, last]
        return bool(self.state[first, last] + live * saved <= capacity)

    def sizes(self, live: float) -> tuple[Array, Array]:
        """Return the least bytes that each run holds, and whether it computes again."""
        choices = sorted(self.remat, reverse=True)
        held = np.array([self.state + live * self.saved[remat] for remat in choices])
        least = held.argmin(0)
        found = held.min(0)
        found[np.tril(np.ones(found.shape, dtype=bool), -1)] = np.inf
        return found, np.array(choices)[least] == "full"


class RunCuts:
    """The runs with the least bottleneck, for any number of stages.

    Takes some 0.5 ms a stage for 400 works, when that many stages are first asked for.

    Args:
        tables: The costs of runs.
        lives: Microbatches in flight in a stage with 1, 2, … stages to the end; those
            of further stages are the last one's.
        capacity: Bytes that a stage may hold; None to minimise the most bytes of a
            stage in place of its time.
    """

    def __init__(
        self, tables: RunTables, lives: Sequence[float], capacity: float | None
    ) -> None:
        self._tables = tables
        self._lives = lives
        self._capacity = capacity
        self._kept: tuple[float, tuple[Array, Array]] | None = None
        self._choices: list[Choice] = []
        self._bottlenecks: list[float] = []
        self._rests = np.full(len(tables.order) + 1, np.inf)
        self._rests[-1] = 0.0

    def _add_stage(self) -> None:
        """Add one stage in front of all others."""
        live = self._lives[min(len(self._choices), len(self._lives) - 1)]
        if self._kept is None or self._kept[0] != live:
            tables, capacity = self._tables, self._capacity
            if capacity is None:
                self._kept = live, tables.sizes(live)
            else:
                self._kept = live, tables.times(live, capacity)
        times, again = self._kept[1]
        self._rests, ends = with_stage(times, self._rests, self._tables.scratch)
        self._choices.append((ends, again[np.arange(len(ends)), ends]))
        self._bottlenecks.append(float(self._rests[0]))

    def division(self, num_stages: int) -> Division | None:
        """Follow the choices from the first work to the last, None if none fit."""
        order = self._tables.order
        if num_stages > len(order):
            return None
        while len(self._choices) < num_stages:
            self._add_stage()
        bottleneck_s = self._bottlenecks[num_stages - 1]
        if bottleneck_s == np.inf:
            return None
        return division_of(order, bottleneck_s, self._choices[num_stages - 1 :: -1])

    def fit(self, num_stages: int, lives: Sequence[float], capacity: float) -> bool:
        """Return whether a division fits another bound, and so is the best of it.

        Args:
            num_stages: Number of stages, as of a division that was asked for.
            lives: As above, but of the other bound.
            capacity: The other bound on what a stage may hold.
        """
        first = 0
        for number in reversed(range(num_stages)):
            last = int(self._choices[number][0][first])
            live = lives[min(number, len(lives) - 1)]
            if not self._tables.fits_run(first, last, live, capacity):
                return False
            first = last + 1
        return True


def with_stage(
    times: Array, rests: Array, scratch: Array
) -> tuple[Array, NDArray[np.int_]]:
    """Add one stage in front of all others.

    Args:
        times: The time of each run as that stage.
        rests: The least bottleneck of the others if they begin at each place.
        scratch: An array like the times, to write to.

    Returns:
        The same bottlenecks with that stage, and where it then ends.
    """
    count = len(times)
    ends = np.empty(count, dtype=int)
    found = np.full(count + 1, np.inf)
    # No run ends before it begins.
    for first in range(0, count, _LINES):
        lines = slice(first, first + _LINES)
        worst = scratch[lines, first:]
        np.maximum(times[lines, first:], rests[None, first + 1 :], out=worst)
        last = worst.argmin(1)
        ends[lines] = last + first
        found[:-1][lines] = worst[np.arange(len(last)), last]
    return found, ends


def division_of(
    order: Order, bottleneck_s: float, choices: Sequence[Choice]
) -> Division:
    """Follow choices from the first work to the last.

    Args:
        order: The works in their order.
        bottleneck_s: The longest time of a stage.
        choices: The choice of each stage.
    """
    stages = [0] * len(order)
    remat, first = [], 0
    for stage, (ends, again) in enumerate(choices):
        last = int(ends[first])
        for place in range(first, last + 1):
            stages[order[place]] = stage
        remat.append("full" if again[first] else "none")
        first = last + 1
    return Division(bottleneck_s=bottleneck_s, stages=tuple(stages), remat=tuple(remat))
