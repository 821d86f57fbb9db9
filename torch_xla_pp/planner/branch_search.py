"""Stages of which some are branches of the model, with the least bottleneck.

A stage is a run of parts of a series, a run of whole branches, or is within a part. The
*depth* of a stage is the number of stages on the longest path from it to the end, and
bounds its microbatches in flight: parallel branches do not add to each other's depth,
so that they hold less and fill sooner than a chain of as many stages.

For each part the least bottleneck is found for every number of ranks, bound on the
depth of its first stage, and depth of what follows it. With equal ranks the bottleneck
is a number that is minimised, so that there is no search for a feasible one.

Source: the recursion over series and parallel parts is that of Jeon et al., "GraphPipe:
Improving Performance and Scalability of DNN Training with Graph Pipeline Parallelism",
ASPLOS 2025, here with one rank for a stage; runs of branches as one stage,
and the tables in place of its binary search, are ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_xla_pp.planner.evaluation import renumbered
from torch_xla_pp.planner.runs_search import Division, OrderRuns, RunTables
from torch_xla_pp.planner.work_costs import WorkCosts
from torch_xla_pp.planner.work_tree import WorkTree

Table = NDArray[np.float32]

# More ranks and deeper trees than this are left to runs of an order.
MOST_RANKS = 32
_MOST_PARTS = 160
_GAIN = 0.99
# Parts whose times differ only by rounding share a table.
_ROUNDING = 1 + 1e-6


class BranchTables:
    """The tree of a model, and the costs of runs of its works.

    Args:
        tree: The tree.
        order: Its works in their order.
        works: The costs of works.
        remat: Which of "none" and "full" are allowed.
    """

    def __init__(
        self,
        tree: WorkTree,
        order: OrderRuns,
        works: WorkCosts,
        remat: Sequence[str],
    ) -> None:
        self.tree = tree
        self.runs = RunTables(order, works, remat)


class _Run(NamedTuple):
    """A stage: its first and last work in their order, bound of depth, and remat."""

    first: int
    last: int
    depth: int
    again: bool


@dataclass(frozen=True, eq=False)
class _Solved:
    """A part's least bottlenecks by ranks, bound of depth, and depth after it.

    Args:
        least: The bottlenecks of the part.
        rests: The same for its parts from each one on, and for no part.
        parts: The parts themselves.
    """

    least: Table
    rests: tuple[Table, ...] = ()
    parts: tuple["_Solved | None", ...] = ()


def cut_branches(
    tables: BranchTables, num_ranks: int, lives: Sequence[float], capacity: float
) -> list[Division]:
    """Return the best stages for each depth that pays, the least depth first.

    Args:
        tables: The costs of runs.
        num_ranks: Number of stages.
        lives: Microbatches in flight in a stage of depth 1, 2, …
        capacity: Bytes that a stage may hold.
    """
    return BranchCuts(tables, num_ranks, lives, capacity).divisions(num_ranks)


class BranchCuts:
    """Tables of a tree for up to so many ranks; none if these are too many.

    Args:
        tables: The costs of runs.
        most_ranks: The most stages to be asked for.
        lives: Microbatches in flight in a stage of depth 1, 2, …; the last one's are
            those of further depths.
        capacity: Bytes that a stage may hold.
    """

    def __init__(
        self,
        tables: BranchTables,
        most_ranks: int,
        lives: Sequence[float],
        capacity: float,
    ) -> None:
        tree = tables.tree
        self.most_ranks = most_ranks
        self._tables = tables
        self._found: dict[int, list[tuple[float, list[_Run]]]] = {}
        self._solver = None
        if most_ranks <= MOST_RANKS + 1 and len(tree.parts) <= _MOST_PARTS:
            self._solver = _Solver(tables, most_ranks, lives, capacity)
            self._root = self._solver.solve(tree, 0)

    def divisions(self, num_ranks: int) -> list[Division]:
        """Return the best stages for each depth that pays, the least depth first."""
        works = self._tables.tree.works
        found = []
        for bottleneck_s, runs in self._best(num_ranks):
            stages = [0] * len(works)
            for stage, run in enumerate(runs):
                for place in range(run.first, run.last + 1):
                    stages[works[place]] = stage
            remat = tuple("full" if run.again else "none" for run in runs)
            found.append(
                Division(bottleneck_s=bottleneck_s, stages=tuple(stages), remat=remat)
            )
        return found

    def fit(self, num_ranks: int, lives: Sequence[float], capacity: float) -> bool:
        """Return whether the best stages fit another bound, and so are the best of it.

        Args:
            num_ranks: Number of stages.
            lives: As above, but of the other bound.
            capacity: The other bound on what a stage may hold, below that above.
        """
        return all(
            self._tables.runs.fits_run(
                run.first, run.last, lives[min(run.depth, len(lives)) - 1], capacity
            )
            for _, runs in self._best(num_ranks)
            for run in runs
        )

    def _best(self, num_ranks: int) -> list[tuple[float, list[_Run]]]:
        """Return the bottleneck and the stages for each depth that pays."""
        if self._solver is None:
            return []
        if num_ranks not in self._found:
            found = self._found[num_ranks] = []
            best = np.inf
            for depth in range(1, num_ranks + 1):
                least = float(self._root.least[num_ranks, depth, 0])
                if least < _GAIN * best:
                    best = least
                    runs = self._solver.trace(self._root, num_ranks, depth)
                    found.append((least, runs))
        return self._found[num_ranks]


def absorbed(
    division: Division, edges: Sequence[tuple[int, int]], loads: Sequence[float]
) -> list[Division]:
    """Join two stages, so that a join of branches needs no stage of its own.

    Source: the case study of the paper above, whose join is on the rank of a branch.

    Args:
        division: One stage more than there are ranks.
        edges: Edges between works.
        loads: The time of each work.

    Returns:
        The one or two joined divisions with the least bottleneck.
    """
    stages = division.stages
    pairs = {(stages[p], stages[c]) for p, c in edges if stages[p] != stages[c]}
    sums = np.bincount(stages, loads)
    found: list[tuple[float, Division]] = []
    for first, second in sorted(pairs):
        joined = [first if stage == second else stage for stage in stages]
        if renumbered(joined, edges) is None:
            continue
        labels = sorted(set(joined))
        remat = [division.remat[label] for label in labels]
        if "full" in (division.remat[first], division.remat[second]):
            remat[labels.index(first)] = "full"
        most = max(float(sums[first] + sums[second]), division.bottleneck_s)
        numbers = {label: number for number, label in enumerate(labels)}
        merged = Division(
            bottleneck_s=most,
            stages=tuple(numbers[label] for label in joined),
            remat=tuple(remat),
        )
        found.append((most, merged))
    found.sort(key=lambda pair: pair[0])
    return [merged for _, merged in found[:2]]


def least_bottlenecks(
    tables: BranchTables, num_ranks: int, lives: Sequence[float], capacity: float
) -> Table:
    """Return the least bottleneck by number of stages and bound of the depth."""
    solver = _Solver(tables, num_ranks, lives, capacity)
    found: Table = solver.solve(tables.tree, 0).least[:, :, 0]
    return found


class _Solver:
    """Tables of one tree for one number of ranks."""

    def __init__(
        self,
        tables: BranchTables,
        num_ranks: int,
        lives: Sequence[float],
        capacity: float,
    ) -> None:
        self._tree = tables.tree
        self._num_ranks = num_ranks
        own = [lives[min(depth, len(lives) - 1)] for depth in range(num_ranks)]
        known = {live: tables.runs.times(live, capacity) for live in {*own}}
        pairs = [known[live] for live in own]
        # Axes: depth, first work, last work.
        self._times = np.array([times for times, _ in pairs], dtype=np.float32)
        self._again = np.array([again for _, again in pairs])
        self._known: dict[bytes, _Solved] = {}

    def solve(self, tree: WorkTree, start: int) -> _Solved:
        """Return the bottlenecks of a part whose works begin at `start`."""
        end = start + len(tree.works)
        part = self._times[:, start:end, start:end]
        key = repr(_shape(tree)).encode() + part.tobytes()
        if key not in self._known:
            if tree.kind == "work":
                least = self._alone(start, end - 1)
                self._known[key] = _Solved(least)
            else:
                self._known[key] = self._solve_parts(tree, start)
        return self._known[key]

    def trace(self, root: _Solved, num_ranks: int, depth: int) -> list[_Run]:
        """Return the stages with the least bottleneck of a depth."""
        found: list[_Run] = []
        self._trace(root, self._tree, 0, num_ranks, depth, 0, found)
        return found

    def _run(self, first: int, last: int, depth: int) -> _Run:
        again = bool(self._again[depth - 1, first, last])
        return _Run(first=first, last=last, depth=depth, again=again)

    def _nothing(self) -> Table:
        """Return the table of no works: no rank, and the depth of what follows."""
        count = self._num_ranks
        found = np.full((count + 1, count + 1, count + 1), np.inf, dtype=np.float32)
        for depth in range(count + 1):
            found[0, depth, : depth + 1] = 0.0
        return found

    def _one_branch(self, first: int, last: int) -> Table:
        """Return the time of one stage by bound of its depth, and what follows it."""
        times = np.append(self._times[:, first, last], np.float32(np.inf))
        depths = np.arange(len(times))
        is_deeper = depths[:, None] > depths[None, :]
        found: Table = np.where(is_deeper, times[None, :], np.float32(np.inf))
        return found

    def _alone(self, first: int, last: int) -> Table:
        """Return the table of one stage."""
        found = np.full_like(self._nothing(), np.inf)
        found[1] = self._one_branch(first, last)
        return found

    def _solve_parts(self, tree: WorkTree, start: int) -> _Solved:
        solved: list[_Solved | None] = []
        starts = [start]
        for part in tree.parts:
            is_one = part.kind == "work"
            solved.append(None if is_one else self.solve(part, starts[-1]))
            starts.append(starts[-1] + len(part.works))
        rests = [self._nothing()]
        for number in reversed(range(len(tree.parts))):
            rest = np.full_like(rests[0], np.inf)
            for end in range(number + 1, len(starts)):
                # There are no more stages than works.
                most = min(self._num_ranks, 1 + starts[-1] - starts[end])
                after = rests[end - number - 1][:most]
                first, last = starts[number], starts[end] - 1
                # One rank more, and in a series one stage deeper.
                if tree.kind == "series":
                    times = self._times[:, first, last][None, :, None]
                    own, one = rest[1 : most + 1, 1:], np.maximum(after[:, :-1], times)
                else:
                    branch = self._one_branch(first, last)
                    own, one = rest[1 : most + 1], np.maximum(after, branch)
                np.minimum(own, one, out=own)
            part_solved = solved[number]
            if part_solved is not None:
                join = _before if tree.kind == "series" else _beside
                sizes = starts[number + 1] - starts[number], starts[-1] - starts[number]
                join(part_solved.least, rests[0], rest, *sizes)
            some = rest[: 1 + starts[-1] - starts[number]]
            np.minimum.accumulate(some, axis=1, out=some)
            rests.insert(0, rest)
        return _Solved(rests[0], tuple(rests), tuple(solved))

    def _trace(
        self,
        solved: _Solved,
        tree: WorkTree,
        start: int,
        ranks: int,
        depth: int,
        after: int,
        found: list[_Run],
    ) -> None:
        """Note the stages of a part."""
        if tree.kind == "work":
            found.append(self._run(start, start, depth))
            return
        number, count = 0, len(tree.parts)
        starts = [start]
        for part in tree.parts:
            starts.append(starts[-1] + len(part.works))
        while number < count:
            # The least bound on the depth that reaches the same bottleneck.
            line = solved.rests[number][ranks, :, after]
            value = line[depth] * _ROUNDING
            if tree.kind == "series":
                number, ranks, depth = self._trace_series(
                    solved, tree, starts, number, (ranks, depth, after), value, found
                )
            else:
                number, ranks = self._trace_branch(
                    solved, tree, starts, number, (ranks, depth, after), value, found
                )

    def _trace_series(
        self,
        solved: _Solved,
        tree: WorkTree,
        starts: Sequence[int],
        number: int,
        state: tuple[int, int, int],
        value: float,
        found: list[_Run],
    ) -> tuple[int, int, int]:
        """Note the first stage or part of a series; return what is left."""
        ranks, depth, after = state
        first = starts[number]
        for bound in range(1, depth + 1):
            for end in range(number + 1, len(starts)):
                last = starts[end] - 1
                rest = solved.rests[end][ranks - 1, bound - 1, after]
                if max(rest, self._times[bound - 1, first, last]) <= value:
                    found.append(self._run(first, last, bound))
                    return end, ranks - 1, bound - 1
        part = solved.parts[number]
        if part is None:
            raise RuntimeError("branch search: expected a stage that reaches its bound")
        for own in range(1, ranks + 1):
            for middle in range(depth + 1):
                rest = solved.rests[number + 1][ranks - own, middle, after]
                if max(rest, part.least[own, depth, middle]) <= value:
                    tree_part = tree.parts[number]
                    self._trace(part, tree_part, first, own, depth, middle, found)
                    return number + 1, ranks - own, middle
        raise RuntimeError("branch search: expected a part that reaches its bound")

    def _trace_branch(
        self,
        solved: _Solved,
        tree: WorkTree,
        starts: Sequence[int],
        number: int,
        state: tuple[int, int, int],
        value: float,
        found: list[_Run],
    ) -> tuple[int, int]:
        """Note the first branches; return what is left."""
        ranks, depth, after = state
        first = starts[number]
        for end in range(number + 1, len(starts)):
            last = starts[end] - 1
            rest = solved.rests[end][ranks - 1, depth, after]
            if after < depth and max(rest, self._times[after, first, last]) <= value:
                found.append(self._run(first, last, after + 1))
                return end, ranks - 1
        part = solved.parts[number]
        if part is None:
            raise RuntimeError("branch search: expected a stage that reaches its bound")
        for own in range(1, ranks + 1):
            rest = solved.rests[number + 1][ranks - own, depth, after]
            if max(rest, part.least[own, depth, after]) <= value:
                tree_part = tree.parts[number]
                self._trace(part, tree_part, first, own, depth, after, found)
                return number + 1, ranks - own
        raise RuntimeError("branch search: expected a branch that reaches its bound")


def _before(
    first: Table, rest: Table, found: Table, num_works: int, num_all: int
) -> None:
    """Put a part before a rest: ranks add up, the rest's depth is what follows it.

    The rest is no deeper than its ranks and those that follow it, so that a greater
    depth of it, in which no part takes less, is not looked at; neither are depths of
    what follows that leave too few ranks, or more ranks than works.

    Args:
        first: The part.
        rest: What comes after it.
        found: Receives the least bottlenecks of both.
        num_works: Works of the part.
        num_all: Works of both.
    """
    most = len(rest) - 1
    for own in range(1, min(most, num_works) + 1):
        end = min(most - own, num_all - num_works) + 1
        for middle in range(most - own + 1):
            head = first[own, None, middle + 1 :, middle, None]
            tail = rest[:end, None, middle, : middle + 1]
            part = found[own : own + end, middle + 1 :, : middle + 1]
            np.minimum(part, np.maximum(head, tail), out=part)


def _beside(
    first: Table, rest: Table, found: Table, num_works: int, num_all: int
) -> None:
    """Put a branch beside others, as `_before`; what follows is the same."""
    most = len(rest) - 1
    for own in range(1, min(most, num_works) + 1):
        end = min(most - own, num_all - num_works) + 1
        part = found[own : own + end]
        np.minimum(part, np.maximum(first[own][None], rest[:end]), out=part)


def _shape(tree: WorkTree) -> object:
    return tree.kind, len(tree.works), tuple(_shape(part) for part in tree.parts)
