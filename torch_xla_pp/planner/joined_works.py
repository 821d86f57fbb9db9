"""Joined works, where there are too many works for tables of all runs.

Two works are joined if one is the only user, or the only producer, of the other's
values: then no cycle arises, and branches are preserved. The lightest pair goes first,
so that joined works are about equally heavy. Where that leaves too many, runs of the
program's order are joined.

Only the search sees joined works; the costs of a cut are counted with all works.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from heapq import heapify, heappop, heappush
from operator import attrgetter

from torch_xla_pp.planner.evaluation import Evaluation, Evaluator
from torch_xla_pp.planner.measured_costs import MeasuredCosts, WorkSeconds
from torch_xla_pp.planner.strategies import Strategy
from torch_xla_pp.planner.work_costs import WorkTable
from torch_xla_pp.work import (
    Amount,
    Cost,
    Work,
    WorkGraph,
    WorkParameter,
    WorkPart,
    WorkValue,
    added_parts,
)

MOST_WORKS = 512

_Groups = tuple[int, ...]  # joined work of each work


def joined_evaluator(evaluator: Evaluator, most: int = MOST_WORKS) -> Evaluator:
    """Return the evaluator for a search: the same one, or one of joined works.

    Args:
        evaluator: The evaluator of cuts of all works.
        most: The most works that a search is to see.
    """
    graph = evaluator.table.graph
    if len(graph.works) <= most:
        return evaluator
    weights = sum(evaluator.works(Strategy(), graph.rows).seconds).tolist()  # type: ignore[union-attr]
    groups = joined_groups(graph, weights, most)
    joined, measured = joined_graph(graph, groups), evaluator.table.measured
    if measured is not None:
        measured = joined_costs(measured, graph, groups, joined)
    table = WorkTable(joined, measured, evaluator.table.rules)
    return replace(evaluator, table=table, whole=evaluator, groups=groups)


def with_all_works(evaluation: Evaluation, evaluator: Evaluator) -> Evaluation:
    """Return an evaluation of joined works with the stages of all works."""
    if evaluator.whole is None:
        return evaluation
    return replace(evaluation, cut=evaluator.whole_cut(evaluation.cut))


def joined_groups(graph: WorkGraph, weights: Sequence[float], most: int) -> _Groups:
    """Return for each work the number of its group, in the order of data flow.

    Args:
        graph: The works.
        weights: The time of each.
        most: The most groups.
    """
    pool = _Pool(graph, weights)
    pool.join(most)
    heads = pool.heads()
    if len(set(heads)) > most:
        heads = _runs(weights, most)
    return _numbered(heads, graph.edges)


class _Pool:
    """_Groups of works, each named by one of its works, and the edges between them."""

    def __init__(self, graph: WorkGraph, weights: Sequence[float]) -> None:
        count = len(graph.works)
        self._weights = [*weights]
        self._parents = [*range(count)]
        self._ins: list[set[int]] = [set() for _ in range(count)]
        self._outs: list[set[int]] = [set() for _ in range(count)]
        for producer, consumer in graph.edges:
            self._outs[producer].add(consumer)
            self._ins[consumer].add(producer)
        self._count = count

    def join(self, most: int) -> None:
        """Join the lightest pairs until there are few enough, or none are left."""
        pairs = [
            (self._weights[first] + self._weights[second], first, second)
            for first in range(self._count)
            for second in self._outs[first]
        ]
        heapify(pairs)
        while self._count > most and pairs:
            weight, first, second = heappop(pairs)
            is_edge = second in self._outs[first]
            if not is_edge or weight != self._weights[first] + self._weights[second]:
                continue  # One of them has grown, and its pairs were added again.
            if len(self._outs[first]) > 1 and len(self._ins[second]) > 1:
                continue  # There may be another path from the first to the second.
            for pair in self._joined(first, second):
                heappush(pairs, pair)

    def heads(self) -> list[int]:
        """Return the name of the group of each work."""
        found = []
        for work in range(len(self._parents)):
            while self._parents[work] != work:
                work = self._parents[work]
            found.append(work)
        return found

    def _joined(self, first: int, second: int) -> Iterator[tuple[float, int, int]]:
        """Put the second into the first; yield the pairs whose weight has changed."""
        ins, outs = self._ins, self._outs
        outs[first] |= outs[second]
        outs[first] -= {first, second}
        ins[first] |= ins[second]
        ins[first] -= {first, second}
        for user in outs[second]:
            ins[user].discard(second)
            ins[user].add(first)
        for maker in ins[second] - {first}:
            outs[maker].discard(second)
            outs[maker].add(first)
        outs[second], ins[second] = set(), set()
        self._parents[second] = first
        self._weights[first] += self._weights[second]
        self._count -= 1
        weights = self._weights
        for user in sorted(outs[first]):
            yield weights[first] + weights[user], first, user
        for maker in sorted(ins[first]):
            yield weights[maker] + weights[first], maker, first


def _runs(weights: Sequence[float], most: int) -> list[int]:
    """Return the run of each work, in equally heavy runs of the program's order."""
    share = sum(weights) / most
    found, run, weight = [], 0, 0.0
    for own in weights:
        if weight and weight + own > share and run + 1 < most:
            run, weight = run + 1, 0.0
        weight += own
        found.append(run)
    return found


def _numbered(heads: Sequence[int], edges: Sequence[tuple[int, int]]) -> _Groups:
    """Number groups by data flow, the one with the first work first."""
    users: dict[int, set[int]] = {head: set() for head in heads}
    needs = dict.fromkeys(users, 0)
    for producer, consumer in edges:
        first, second = heads[producer], heads[consumer]
        if first != second and second not in users[first]:
            users[first].add(second)
            needs[second] += 1
    places = {head: place for place, head in reversed([*enumerate(heads)])}
    free = [(places[head], head) for head, count in needs.items() if not count]
    heapify(free)
    numbers: dict[int, int] = {}
    while free:
        _, head = heappop(free)
        numbers[head] = len(numbers)
        for user in users[head]:
            needs[user] -= 1
            if not needs[user]:
                heappush(free, (places[user], user))
    return tuple(numbers[head] for head in heads)


def joined_graph(graph: WorkGraph, groups: _Groups) -> WorkGraph:
    """Return the graph of joined works: sums of costs, and the values between them.

    Args:
        graph: All works.
        groups: The joined work of each.
    """
    members: list[list[Work]] = [[] for _ in range(max(groups) + 1)]
    for work, group in zip(graph.works, groups, strict=True):
        members[group].append(work)
    names = [own[-1].name for own in members]
    home = {w.name: names[g] for w, g in zip(graph.works, groups, strict=True)}
    order = {name: place for place, name in enumerate(names)}
    kept: dict[str, list[WorkValue]] = {name: [] for name in names}
    passed: dict[str, list[WorkValue]] = {name: [] for name in names}
    values = []
    left = _values_left(graph, home)
    keepers_of, passers_of, again_of = (
        _readers(graph, home, {value.name: of(value) for value in graph.values})
        for of in map(attrgetter, ("kept_by", "passed_by", "passed_again_by"))
    )
    unread_of = _unread(graph, home)
    for value in graph.values:
        producer = None if value.producer is None else home[value.producer]
        users = {home[user] for user in value.users} - {producer}
        keepers, passers = keepers_of[value.name], passers_of[value.name]
        if producer is None or value.name in left:
            values.append(
                replace(
                    value,
                    producer=producer,
                    users=tuple(sorted(users, key=order.__getitem__)),
                    kept_by=tuple(sorted(keepers, key=order.__getitem__)),
                    passed_by=tuple(sorted(passers, key=order.__getitem__)),
                    passed_again_by=tuple(
                        sorted(again_of[value.name], key=order.__getitem__)
                    ),
                    unread_by=tuple(
                        sorted(unread_of[value.name] & users, key=order.__getitem__)
                    ),
                )
            )
            continue
        if keepers:
            kept[producer].append(value)
        if passers:
            passed[producer].append(value)
    works = tuple(
        _joined_work(own, kept[name], passed[name])
        for own, name in zip(members, names, strict=True)
    )
    return WorkGraph(
        works=works,
        values=tuple(values),
        rows=graph.rows,
        outputs=graph.outputs,
        has_loss=graph.has_loss,
        source=graph.source,
    )


def _values_left(graph: WorkGraph, home: Mapping[str, str]) -> set[str]:
    """Return the values that leave a joined work, and what they are views of."""
    wholes = {value.name: value.view_of for value in graph.values}
    found = {*graph.outputs}
    for value in graph.values:
        producer = home.get(value.producer or "")
        if producer is None or {home[user] for user in value.users} - {producer}:
            found.add(value.name)
    for name in [*found]:
        while (whole := wholes[name]) is not None:
            found.add(name := whole)
    return found


def _readers(
    graph: WorkGraph, home: Mapping[str, str], readers: Mapping[str, Sequence[str]]
) -> dict[str, set[str]]:
    """Return the joined works that read each value, or views of it that they make.

    Args:
        graph: All works.
        home: The joined work of each.
        readers: The works that read each value.
    """
    known = {value.name: value for value in graph.values}
    found: dict[str, set[str]] = {name: set() for name in known}
    for name, works in readers.items():
        for work in {home[work] for work in works}:
            value = known[name]
            while value.view_of and home.get(value.producer or "") == work:
                value = known[value.view_of]
            found[value.name].add(work)
    return found


def _unread(graph: WorkGraph, home: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the joined works whose I, computing again, does not read each value.

    Args:
        graph: All works.
        home: The joined work of each.
    """
    read: dict[str, set[str]] = {value.name: set() for value in graph.values}
    needed: set[str] = set()
    used: dict[str, list[WorkValue]] = {work.name: [] for work in graph.works}
    for value in graph.values:
        for user in value.users:
            used[user].append(value)
    for work in reversed(graph.works):
        for value in used[work.name]:
            if work.name in needed or work.name not in value.unread_by:
                read[value.name].add(home[work.name])
                is_inside = home.get(value.producer or "") == home[work.name]
                needed |= {value.producer or ""} if is_inside else set()
    return {
        value.name: {home[user] for user in value.users} - read[value.name]
        for value in graph.values
    }


def joined_costs(
    measured: MeasuredCosts, graph: WorkGraph, groups: _Groups, joined: WorkGraph
) -> MeasuredCosts:
    """Return what joined works were measured to take: sums over their works.

    Args:
        measured: What the works take.
        graph: All works.
        groups: The joined work of each.
        joined: The graph of joined works.
    """
    members: list[list[WorkSeconds]] = [[] for _ in joined.works]
    for seconds, group in zip(measured.of(graph.works), groups, strict=True):
        members[group].append(seconds)
    kinds = {
        work.digest: WorkSeconds.added(own, work.digest, work.name)
        for work, own in zip(joined.works, members, strict=True)
    }
    return replace(measured, works=tuple(kinds.values()))


def _joined_work(
    members: Sequence[Work], kept: Sequence[WorkValue], passed: Sequence[WorkValue]
) -> Work:
    """Return one work for several; a value within them is kept as its own is.

    Args:
        members: The works.
        kept: Values between them that a backward reads.
        passed: Those that W reads.
    """
    last = members[-1]
    parameters: dict[str, WorkParameter] = {}
    for parameter in (p for work in members for p in work.parameters):
        parameters.setdefault(parameter.tied or parameter.name, parameter)
    saved, late, made = (
        {
            remat: reduce(Amount.__add__, (amounts[remat] for amounts in held))
            for remat in ("none", "full")
        }
        for held in (
            [w.saved for w in members],
            [w.passed for w in members],
            [w.made for w in members],
        )
    )
    return replace(
        last,
        ops=tuple(op for work in members for op in work.ops),
        digest=" ".join(work.digest for work in members),
        forward=reduce(Cost.__add__, (work.forward for work in members)),
        backward_input=reduce(Cost.__add__, (w.backward_input for w in members)),
        backward_weight=reduce(Cost.__add__, (w.backward_weight for w in members)),
        saved=saved | {"none": _total(saved["none"], kept)},
        passed=late | {"none": _total(late["none"], passed)},
        made=made,
        parameters=tuple(parameters.values()),
        sums=tuple(one for work in members for one in work.sums),
        parts=added_parts(
            [
                *(part for work in members for part in work.parts),
                *(_part(v, v.size, Amount()) for v in kept if v.dims),
                *(_part(v, Amount(), v.size) for v in passed if v.dims),
            ]
        ),
    )


def _total(own: Amount, values: Sequence[WorkValue]) -> Amount:
    return reduce(Amount.__add__, (value.size for value in values), own)


def _part(value: WorkValue, saved: Amount, passed: Amount) -> WorkPart:
    """Return what a work keeps of a value, where nothing is computed again."""
    return WorkPart(
        dims=value.dims,
        saved={"none": saved, "full": Amount()},
        passed={"none": passed, "full": Amount()},
    )
