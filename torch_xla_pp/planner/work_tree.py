"""A graph of works as a tree of series and of branches.

In a *series* every work of a part is below every work of the next one; the parts of
*branches* are independent. Where a graph is neither, parts are put in a series along
its longest path: the additional order restricts where stages may be cut, but never the
execution.

Source: series and parallel parts are those of Jeon et al., "GraphPipe: Improving
Performance and Scalability of DNN Training with Graph Pipeline Parallelism", ASPLOS
2025; the series along a path is ours.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkTree:
    """A part of the graph.

    Args:
        kind: The relation of its parts; a work has none.
        works: Its works; those of each part follow each other.
        parts: Its parts.
    """

    kind: Literal["work", "series", "branches"]
    works: tuple[int, ...]
    parts: tuple["WorkTree", ...] = ()

    @property
    def has_branches(self) -> bool:
        """Whether there are branches anywhere in it."""
        return self.kind == "branches" or any(p.has_branches for p in self.parts)


def tree_of(ancestors: Sequence[int], weights: Sequence[float]) -> WorkTree:
    """Return the tree of all works.

    Args:
        ancestors: For each work a number with a bit for each work below it.
        weights: The time of each work.
    """
    return _tree(tuple(range(len(ancestors))), ancestors, weights)


def _tree(
    works: tuple[int, ...], ancestors: Sequence[int], weights: Sequence[float]
) -> WorkTree:
    if len(works) == 1:
        return WorkTree(kind="work", works=works)
    kind: Literal["series", "branches"] = "series"
    groups = [*_series(works, ancestors)]
    if len(groups) == 1:
        groups, kind = _components(works, ancestors), "branches"
    if len(groups) == 1:
        groups, kind = _along_path(works, ancestors, weights), "series"
    parts = tuple(_tree(group, ancestors, weights) for group in groups)
    if kind == "series":
        # A series within a series becomes a part of it.
        parts = tuple(p for part in parts for p in _spread(part))
    order = tuple(work for part in parts for work in part.works)
    return WorkTree(kind=kind, works=order, parts=parts)


def _spread(part: WorkTree) -> tuple[WorkTree, ...]:
    return part.parts if part.kind == "series" else (part,)


def _series(
    works: tuple[int, ...], ancestors: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Yield the shortest parts each of which is below all that come after it."""
    commons = [-1]
    for work in reversed(works):
        commons.append(commons[-1] & ancestors[work])
    commons.reverse()
    first, mask = 0, 0
    for place, work in enumerate(works):
        mask |= 1 << work
        if place + 1 == len(works) or mask & ~commons[place + 1] == 0:
            yield works[first : place + 1]
            first = place + 1


def _components(
    works: tuple[int, ...], ancestors: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return groups of works of which none depends on another group."""
    inside = sum(1 << work for work in works)
    groups: list[int] = []
    for work in works:
        joined = 1 << work | ancestors[work] & inside
        apart = []
        for group in groups:
            if group & joined:
                joined |= group
            else:
                apart.append(group)
        groups = [*apart, joined]
    found = [tuple(work for work in works if group >> work & 1) for group in groups]
    return sorted(found)


def _along_path(
    works: tuple[int, ...], ancestors: Sequence[int], weights: Sequence[float]
) -> list[tuple[int, ...]]:
    """Return the works below each work of the heaviest path, and the remaining ones."""
    longest: dict[int, float] = {}
    before: dict[int, int | None] = {}
    for work in works:
        below = [other for other in longest if ancestors[work] >> other & 1]
        last = max(below, key=lambda other: (longest[other], -other), default=None)
        before[work] = last
        longest[work] = weights[work] + (0.0 if last is None else longest[last])
    path = []
    at: int | None = max(works, key=lambda work: (longest[work], -work))
    while at is not None:
        path.append(at)
        at = before[at]
    left, groups = [*works], []
    for work in reversed(path):
        below_or_it = ancestors[work] | 1 << work
        groups.append(tuple(other for other in left if below_or_it >> other & 1))
        left = [other for other in left if not below_or_it >> other & 1]
    return [group for group in [*groups, tuple(left)] if group]
