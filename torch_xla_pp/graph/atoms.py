"""The parts of a traced model that are never cut: its atoms.

Terms: a *group* is some operations that must be in one stage; an *atom* is one or more
groups. A *border* is a place between two groups in an order in which values go forward
only; its *crossing* is the number of bytes that cross it.

Laws: an atom's operations are connected, and no path leaves an atom and comes back,
so any choice of stages by atom is one of `prepare`, if values go forward only.
Operations that compute constants are in the first atom that uses them; `prepare` copies
them into others.
"""

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from torch import Tensor, fx

from torch_xla_pp.graph.assign import is_op
from torch_xla_pp.graph.mutation import Written, is_view
from torch_xla_pp.graph.repeatable import constants_of
from torch_xla_pp.graph.shard import SHARD

# A border is not cut if more than this many times the bytes of one near it cross it.
_MOST_CROSSING = 1.5


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Atom:
    """A part of a model that is never cut.

    Args:
        ops: Its operations, in program order; each operation is in one atom.
        runs: The operations of a stage of this atom alone: without its constants that
            only others use, but with those of others that it uses.
    """

    ops: tuple[fx.Node, ...]
    runs: tuple[fx.Node, ...]


def atoms_of(
    traced: fx.GraphModule,
    written: Sequence[Written],
    weights: Mapping[fx.Node, float],
    regions: Mapping[fx.Node, int],
    *,
    max_stages: int,
) -> tuple[Atom, ...]:
    """Cut a model into atoms.

    Args:
        traced: The model, after `normalize` and `erase_marks`.
        written: Memory that is written in place, as `normalize` returns it.
        weights: Operation → what it costs, in any unit.
        regions: Operation → the checkpointed region that it is in, if any.
        max_stages: For how many stages atoms are to be small enough to balance them.

    Returns:
        The atoms, in an order in which values go forward only.
    """
    constants = set(constants_of(traced, written))
    ops = [x for x in traced.graph.nodes if is_op(x, None) and x not in constants]
    groups = _Groups(ops)
    _join_bound(groups, ops, written, regions)
    _join_free(groups, ops)
    ordered = _ordered(groups, ops)
    borders = _borders(ordered, weights, max_stages)
    atoms = [part for run in _runs(ordered, borders) for part in _connected(run)]
    return tuple(_with_constants(atoms, constants))


class _Groups:
    """Sets of operations that are joined; the first of a group stands for it."""

    def __init__(self, ops: Sequence[fx.Node]) -> None:
        self._above = {op: op for op in ops}
        self._place = {op: place for place, op in enumerate(ops)}

    def __contains__(self, op: object) -> bool:
        return op in self._above

    def of(self, op: fx.Node) -> fx.Node:
        while self._above[op] is not op:
            self._above[op] = self._above[self._above[op]]
            op = self._above[op]
        return op

    def join(self, ops: Iterable[fx.Node]) -> None:
        firsts = {self.of(op) for op in ops if op in self._above}
        for op in firsts:
            self._above[op] = min(firsts, key=self._place.__getitem__)


def _join_bound(
    groups: _Groups,
    ops: Sequence[fx.Node],
    written: Sequence[Written],
    regions: Mapping[fx.Node, int],
) -> None:
    """Join operations that must run in one stage, and checkpointed regions."""
    for memory in written:
        groups.join([memory.root, *memory.accesses, *memory.readers])
    first: dict[int, fx.Node] = {}
    for op in ops:
        if not isinstance(op.meta.get("val"), Tensor):
            groups.join([op, *op.users])
        if op in regions:
            groups.join([op, first.setdefault(regions[op], op)])


def _join_free(groups: _Groups, ops: Sequence[fx.Node]) -> None:
    """Join operations without cost with the maker of an operand, or else with a user.

    The same is done to operations on parameters alone, and to those that nothing uses;
    one with neither operands nor users, such as a counter's update, is joined with the
    next.
    """
    of_batch: set[fx.Node] = set()
    for op in ops:
        made = [x for x in op.all_input_nodes if x in groups]
        if any(x.op == "placeholder" or x in of_batch for x in op.all_input_nodes):
            of_batch.add(op)
        if made and (not op.users or is_view(op) or op.target is SHARD):
            groups.join([op, made[0]])
    following: list[fx.Node] = []
    for op in reversed(ops):
        made = [x for x in op.all_input_nodes if x in groups]
        if op not in of_batch or (is_view(op) and not made):
            users = [user for user in op.users if user in groups][:1]
            groups.join([op, *(users or ([] if made else following))])
        following = [op]


def _ordered(groups: _Groups, ops: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return the groups so that values go forward only; those in a cycle are joined."""
    while True:
        before = _before(groups, ops)
        try:
            TopologicalSorter(before).prepare()
        except CycleError as error:
            groups.join(error.args[1])
        else:
            break
    members: dict[fx.Node, list[fx.Node]] = {}
    for op in ops:
        members.setdefault(groups.of(op), []).append(op)
    return [members[first] for first in _by_program(before, ops)]


def _before(groups: _Groups, ops: Sequence[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Return for each group the groups whose values it uses."""
    before: dict[fx.Node, set[fx.Node]] = {groups.of(op): set() for op in ops}
    for op in ops:
        own = groups.of(op)
        used = {groups.of(x) for x in op.all_input_nodes if x in groups}
        before[own] |= used - {own}
    return before


def _by_program(
    before: Mapping[fx.Node, set[fx.Node]], ops: Sequence[fx.Node]
) -> Iterator[fx.Node]:
    """Yield groups after those that they use, else in the order of their first op."""
    place = {op: i for i, op in enumerate(ops)}
    after: dict[fx.Node, list[fx.Node]] = {first: [] for first in before}
    for first, used in before.items():
        for other in used:
            after[other].append(first)
    left = {first: len(used) for first, used in before.items()}
    ready = [place[first] for first, count in left.items() if not count]
    heapq.heapify(ready)
    while ready:
        first = ops[heapq.heappop(ready)]
        yield first
        for user in after[first]:
            left[user] -= 1
            if not left[user]:
                heapq.heappush(ready, place[user])


def _borders(
    ordered: Sequence[Sequence[fx.Node]],
    weights: Mapping[fx.Node, float],
    max_stages: int,
) -> list[int]:
    """Return the numbers of groups after which to cut.

    A border is dropped if many more bytes cross it than another one within half of the
    work of a stage, or if it is within an eighth of that work from another.
    """
    crossing = _crossing(ordered)
    sums = [0.0]
    for group in ordered:
        sums.append(sums[-1] + math.fsum(weights.get(op, 0.0) for op in group))
    sums.pop(0)
    share = sums[-1] / max_stages if sums else 0.0
    good = []
    for border, count in enumerate(crossing):
        low = bisect_left(sums, sums[border] - share / 2, hi=len(crossing))
        high = bisect_right(sums, sums[border] + share / 2, hi=len(crossing))
        if count <= _MOST_CROSSING * min(crossing[low:high]):
            good.append(border)
    kept: list[int] = []
    for border in sorted(good, key=crossing.__getitem__):
        if all(abs(sums[border] - sums[x]) >= share / 8 for x in kept):
            kept.append(border)
    return sorted(border + 1 for border in kept)


def _crossing(ordered: Sequence[Sequence[fx.Node]]) -> list[int]:
    """Return the bytes that cross each border."""
    place = {op: i for i, group in enumerate(ordered) for op in group}
    change = [0] * len(ordered)
    for op, made in place.items():
        used = max((place.get(user, made) for user in op.users), default=made)
        value = op.meta.get("val")
        if used > made and isinstance(value, Tensor):
            num_bytes = value.numel() * value.element_size()
            change[made] += num_bytes
            change[used] -= num_bytes
    sums, total = [], 0
    for number in change[:-1]:
        total += number
        sums.append(total)
    return sums


def _runs(
    ordered: Sequence[Sequence[fx.Node]], borders: Sequence[int]
) -> Iterator[list[Sequence[fx.Node]]]:
    for low, high in zip([0, *borders], [*borders, len(ordered)], strict=True):
        yield list(ordered[low:high])


def _connected(run: Sequence[Sequence[fx.Node]]) -> list[list[fx.Node]]:
    """Return the connected parts of a run of groups.

    Each may be an atom, as a path that leaves it and comes back would be in the run.
    """
    own = _Groups([op for group in run for op in group])
    for group in run:
        own.join(group)
        for op in group:
            own.join([op, *op.users])
    parts: dict[fx.Node, list[fx.Node]] = {}
    for group in run:
        parts.setdefault(own.of(group[0]), []).extend(group)
    return list(parts.values())


def _with_constants(
    atoms: Sequence[Sequence[fx.Node]], constants: set[fx.Node]
) -> Iterator[Atom]:
    """Yield atoms, each constant in the first one that uses it, else in the first."""
    used = [_reached(ops, constants) for ops in atoms]
    taken: set[fx.Node] = set()
    unused = constants.difference(*used)
    for ops, own in zip(atoms, used, strict=True):
        new = (own | unused) - taken
        taken |= new
        yield Atom(ops=tuple(sorted([*ops, *new])), runs=tuple(sorted([*ops, *own])))


def _reached(ops: Iterable[fx.Node], constants: set[fx.Node]) -> set[fx.Node]:
    """Return the constants that operations depend on."""
    found: set[fx.Node] = set()
    todo = list(ops)
    while todo:
        new = constants.intersection(todo.pop().all_input_nodes) - found
        found |= new
        todo += new
    return found
