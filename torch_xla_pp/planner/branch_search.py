"""Stages of which some are branches of the model, with the least bottleneck.

A stage is a run of parts of a series, a run of whole branches, or it lies within a
part. The *depth* of a stage is the number of stages on the longest path from it to the
end, and bounds its microbatches in flight: parallel branches do not count for each
other, so that they hold less and fill sooner than a chain of as many stages.

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

import numpy as np

from torch_xla_pp.planner.evaluation import renumbered
from torch_xla_pp.planner.runs_search import Division, OrderRuns, RunTables
from torch_xla_pp.planner.work_costs import Array, WorkCosts
from torch_xla_pp.planner.work_tree import WorkTree

# More ranks and deeper trees than this are left to runs of an order.
MOST_RANKS = 32
_MOST_PARTS = 160
_GAIN = 0.99
# Parts whose times differ by rounding alone share a table.
_ROUNDING = 1 + 1e-6


class BranchTables:
    """The tree of a model, and what runs of its works take.

    Args:
        tree: The tree.
        order: Its works in their order.
        works: What works cost.
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


@dataclass(frozen=True, eq=False)
class _Solved:
    """A part's least bottlenecks by ranks, bound of depth, and depth after it.

    Args:
        least: What the part takes.
        rests: The same for its parts from each one on, and for nothing.
        parts: The parts themselves.
    """

    least: Array
    rests: tuple[Array, ...] = ()
    parts: tuple["_Solved | None", ...] = ()


def cut_branches(
    tables: BranchTables, num_ranks: int, lives: Sequence[float], capacity: float
) -> list[Division]:
    """Return the best stages for each depth that pays, the least depth first.

    Args:
        tables: What runs take.
        num_ranks: Number of stages.
        lives: Microbatches in flight in a stage of depth 1, 2, …
        capacity: Bytes that a stage may hold.
    """
    return BranchCuts(tables, num_ranks, lives, capacity).divisions(num_ranks)


class BranchCuts:
    """Tables of a tree for up to so many ranks; none if these are too many.

    Args:
        tables: What runs take.
        most_ranks: The most stages to be asked for.
        lives: Microbatches in flight in a stage of depth 1, 2, …
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
        self._solver = None
        if most_ranks <= MOST_RANKS + 1 and len(tree.parts) <= _MOST_PARTS:
            self._solver = _Solver(tables, most_ranks, lives, capacity)
            self._root = self._solver.solve(tree, 0)

    def divisions(self, num_ranks: int) -> list[Division]:
        """Return the best stages for each depth that pays, the least depth first."""
        found: list[Division] = []
        if self._solver is None:
            return found
        best = np.inf
        for depth in range(1, num_ranks + 1):
            least = float(self._root.least[num_ranks, depth, 0])
            if least < _GAIN * best:
                best = least
                found.append(self._solver.trace(self._root, num_ranks, depth, least))
        return found


def absorbed(
    division: Division, edges: Sequence[tuple[int, int]], loads: Sequence[float]
) -> list[Division]:
    """Join two stages, so that a join of branches needs no stage of its own.

    Source: the case study of the paper above, whose join is on the rank of a branch.

    Args:
        division: One stage more than there are ranks.
        edges: Edges between works.
        loads: What each work takes.

    Returns:
        The one or two joined divisions whose fullest stage takes least.
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
) -> Array:
    """Return the least bottleneck by number of stages and bound of the depth."""
    solver = _Solver(tables, num_ranks, lives, capacity)
    found: Array = solver.solve(tables.tree, 0).least[:, :, 0]
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
        pairs = [tables.runs.times(live, capacity) for live in lives[:num_ranks]]
        # Axes: depth, first work, last work.
        self._times = np.array([times for times, _ in pairs])
        self._again = np.array([again for _, again in pairs])
        self._known: dict[bytes, _Solved] = {}

    def solve(self, tree: WorkTree, start: int) -> _Solved:
        """Return the bottlenecks of a part whose works begin at `start`."""
        end = start + len(tree.works)
        part = self._times[:, start:end, start:end].astype(np.float32)
        key = repr(_shape(tree)).encode() + part.tobytes()
        if key not in self._known:
            if tree.kind == "work":
                least = self._alone(start, end - 1)
                self._known[key] = _Solved(least)
            else:
                self._known[key] = self._solve_parts(tree, start)
        return self._known[key]

    def trace(
        self, root: _Solved, num_ranks: int, depth: int, least: float
    ) -> Division:
        """Return stages with this bottleneck."""
        found: list[tuple[int, int, bool]] = []
        self._trace(root, self._tree, 0, num_ranks, depth, 0, found)
        stages = [0] * len(self._tree.works)
        for stage, (first, last, _) in enumerate(found):
            for place in range(first, last + 1):
                stages[self._tree.works[place]] = stage
        remat = tuple("full" if again else "none" for _, _, again in found)
        return Division(bottleneck_s=least, stages=tuple(stages), remat=remat)

    def _nothing(self) -> Array:
        """Return the table of no works: no rank, and the depth of what follows."""
        count = self._num_ranks
        found = np.full((count + 1, count + 1, count + 1), np.inf)
        for depth in range(count + 1):
            found[0, depth, : depth + 1] = 0.0
        return found

    def _one_stage(self, first: int, last: int, rest: Array) -> Array:
        """Put one stage before a rest: one rank more, and one stage deeper."""
        found = np.full_like(rest, np.inf)
        times = self._times[:, first, last][None, :, None]
        found[1:, 1:] = np.maximum(rest[:-1, :-1], times)
        return found

    def _alone(self, first: int, last: int) -> Array:
        """Put one stage before whatever follows."""
        found = self._one_stage(first, last, self._nothing())
        least: Array = np.minimum.accumulate(found, axis=1)
        return least

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
                after = rests[end - number - 1]
                first, last = starts[number], starts[end] - 1
                if tree.kind == "series":
                    one = self._one_stage(first, last, after)
                else:
                    one = _beside(self._alone(first, last)[:2], after)
                np.minimum(rest, one, out=rest)
            part_solved = solved[number]
            if part_solved is not None:
                join = _before if tree.kind == "series" else _beside
                np.minimum(rest, join(part_solved.least, rests[0]), out=rest)
            rests.insert(0, np.minimum.accumulate(rest, axis=1))
        return _Solved(rests[0], tuple(rests), tuple(solved))

    def _trace(
        self,
        solved: _Solved,
        tree: WorkTree,
        start: int,
        ranks: int,
        depth: int,
        after: int,
        found: list[tuple[int, int, bool]],
    ) -> None:
        """Note first and last work of each stage of a part, and its remat."""
        if tree.kind == "work":
            again = bool(self._again[depth - 1, start, start])
            found.append((start, start, again))
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
        found: list[tuple[int, int, bool]],
    ) -> tuple[int, int, int]:
        """Note the first stage or part of a series; return what is left."""
        ranks, depth, after = state
        first = starts[number]
        for bound in range(1, depth + 1):
            for end in range(number + 1, len(starts)):
                last = starts[end] - 1
                rest = solved.rests[end][ranks - 1, bound - 1, after]
                if max(rest, self._times[bound - 1, first, last]) <= value:
                    again = bool(self._again[bound - 1, first, last])
                    found.append((first, last, again))
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
        found: list[tuple[int, int, bool]],
    ) -> tuple[int, int]:
        """Note the first branches; return what is left."""
        ranks, depth, after = state
        first = starts[number]
        for end in range(number + 1, len(starts)):
            last = starts[end] - 1
            rest = solved.rests[end][ranks - 1, depth, after]
            if after < depth and max(rest, self._times[after, first, last]) <= value:
                found.append((first, last, bool(self._again[after, first, last])))
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


def _before(first: Array, rest: Array) -> Array:
    """Put a part before a rest: ranks add up, the rest's depth is what follows it."""
    found = np.full_like(rest, np.inf)
    count = len(rest)
    for own in range(1, count):
        if not np.isfinite(first[own]).any():
            continue
        for middle in range(count):
            head = first[own][None, :, middle, None]
            tail = rest[: count - own, middle][:, None, :]
            np.minimum(found[own:], np.maximum(head, tail), out=found[own:])
    return found


def _beside(first: Array, rest: Array) -> Array:
    """Put a branch beside others: ranks add up, what follows is the same."""
    found = np.full_like(rest, np.inf)
    count = len(rest)
    for own in range(1, len(first)):
        both = np.maximum(first[own][None], rest[: count - own])
        np.minimum(found[own:], both, out=found[own:])
    return found


def _shape(tree: WorkTree) -> object:
    return tree.kind, len(tree.works), tuple(_shape(part) for part in tree.parts)
