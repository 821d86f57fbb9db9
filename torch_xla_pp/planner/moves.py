"""Improve a cut by small changes, as long as one helps.

A change moves a work over the border of its stage, exchanges two works, joins two
stages and divides another one, or changes what a stage computes again. Where the order
is listed, a rank may have any number of stages: then a stage is also cut in two on its
rank, where some of its works need less of others than the rest does (*fragments*), two
stages of a rank are joined, and stages change ranks. Neighbours are screened by an
estimate of the step: the longest path of one microbatch, and the others at the pace of
the slowest rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from operator import itemgetter

import numpy as np

from torch_xla_pp.planner.evaluation import (
    Cut,
    Evaluation,
    Evaluator,
    renumbered,
    stage_times,
)
from torch_xla_pp.planner.orders import LIST_RULES, LISTED, SPLIT, OrderRule

_ROUNDS = 30
_SMALL = 24
_FRAGMENTS = 3
_NUM_TRIED = 6


def improved(
    evaluator: Evaluator, start: Evaluation, remat: Sequence[str]
) -> Evaluation:
    """Return the best cut that small changes lead to.

    Args:
        evaluator: What evaluates cuts.
        start: Where to begin.
        remat: What stages may choose of "none" and "full".
    """
    return moved_from(evaluator, start, remat)[0]


def moved_from(
    evaluator: Evaluator,
    start: Evaluation,
    remat: Sequence[str],
    most_tried: int | None = None,
) -> tuple[Evaluation, int]:
    """Return the best cut that small changes lead to, and how many were tried.

    Args:
        evaluator: What evaluates cuts.
        start: Where to begin; an order that is listed is made by the same rule, or
            is that of a builder.
        remat: What stages may choose of "none" and "full".
        most_tried: How many neighbours are evaluated, None for any number.
    """
    best = start
    seen = {_key(start.cut)}
    is_small = evaluator.table.num_works <= _SMALL and most_tried is None
    num_near = 10 * _NUM_TRIED if is_small else _NUM_TRIED
    left = inf if most_tried is None else most_tried
    rules: tuple[OrderRule, ...] = LIST_RULES
    if start.rule is not None:
        rules = (start.rule, *LIST_RULES[:4])
    for _ in range(_ROUNDS):
        near = [c for c in neighbours(evaluator, best, remat) if _key(c) not in seen]
        near.sort(key=lambda cut: estimated_s(evaluator, cut))
        tried = near[:num_near]
        more = [cut for cut in near if cut.num_stages > best.cut.num_stages]
        tried += [cut for cut in more[:_FRAGMENTS] if cut not in tried]
        if not tried or len(tried) > left:
            break
        left -= len(tried)
        seen.update(map(_key, tried))
        evaluations = (evaluator.evaluate(cut, rules) for cut in tried)
        found = min(evaluations, key=lambda e: e.sort_key)
        if not found.sort_key < best.sort_key:
            break
        best = found
    return best, len(seen) - 1


def estimated_s(evaluator: Evaluator, cut: Cut) -> float:
    """Estimate a step: the longest path, then the slowest rank for the others.

    Stages of one rank add up, and with several of them a rank waits less.
    """
    setting = cut.setting
    works = evaluator.works(setting.strategy, setting.rows)
    forward, inputs, weights = stage_times(works, cut)
    loads = forward + inputs + weights
    late = setting.schedule in SPLIT
    path = (forward + inputs if late else loads).tolist()
    longest = path[:]
    stages = cut.stages
    pairs = {(stages[p], stages[c]) for p, c in evaluator.table.graph.edges}
    for producer, consumer in sorted(pairs, key=itemgetter(1)):
        if producer != consumer:
            through = longest[producer] + path[consumer]
            if through > longest[consumer]:
                longest[consumer] = through
    ends = np.bincount(stages, works.final_s(setting.replicas), len(path))
    others = (setting.num_microbatches - 1) * loads + ends
    rest: float = max(np.bincount(cut.ranks, others).tolist())
    once: float = max(longest) / setting.stages_per_rank
    return once + rest


def neighbours(
    evaluator: Evaluator, found: Evaluation, remat: Sequence[str]
) -> Iterator[Cut]:
    """Yield cuts that differ a little, all of them valid."""
    cut = found.cut
    focus = _focus(found)
    yielded = set()
    for changed in _changed(evaluator, cut, focus):
        if changed is not None and _key(changed) not in yielded:
            yielded.add(_key(changed))
            yield changed
    for stage in sorted(focus):
        for choice in remat:
            if choice != cut.remat[stage]:
                other = [*cut.remat]
                other[stage] = choice
                yield replace(cut, remat=tuple(other))


def _changed(evaluator: Evaluator, cut: Cut, focus: set[int]) -> Iterator[Cut | None]:
    """Yield cuts in which works have other stages or stages other ranks, if valid."""
    edges = evaluator.table.graph.edges
    ranks, remat = dict(enumerate(cut.ranks)), dict(enumerate(cut.remat))
    for labels in _relabelled(evaluator, cut.stages, focus):
        yield _cut_of(cut, labels, edges, ranks, remat)
    if cut.setting.schedule != LISTED:
        return
    free = cut.num_stages
    for labels, parent in _fragments(evaluator, cut.stages):
        own = {**ranks, free: ranks[parent]}
        yield _cut_of(cut, labels, edges, own, {**remat, free: remat[parent]})
    for stage in range(free):
        for other in range(stage):
            if ranks[stage] == ranks[other]:
                joined = [other if label == stage else label for label in cut.stages]
                yield _cut_of(cut, joined, edges, ranks, remat)
    if free > cut.setting.num_ranks:
        for moved in _placed(ranks, cut.setting.num_ranks, focus):
            yield _cut_of(cut, cut.stages, edges, moved, remat)


def _cut_of(
    cut: Cut,
    labels: Sequence[int],
    edges: Sequence[tuple[int, int]],
    ranks: Mapping[int, int],
    remat: Mapping[int, str],
) -> Cut | None:
    """Return a cut with other labels of stages, None if it is not valid.

    Args:
        cut: All else.
        labels: Any label of each work's stage.
        edges: Edges between works.
        ranks: Rank of each label.
        remat: What each label computes again.
    """
    used = {*labels}
    if len({ranks[label] for label in used}) < cut.setting.num_ranks:
        return None
    if cut.setting.schedule != LISTED and len(used) != cut.num_stages:
        return None
    numbers = renumbered(labels, edges)
    if numbers is None:
        return None
    found = dict(zip(numbers, labels, strict=True))
    order = [found[number] for number in range(len(found))]
    placement = tuple(ranks[label] for label in order) if cut.placement else ()
    if len(placement) == cut.setting.num_ranks:
        placement = tuple(range(len(placement)))  # Ranks are all equal.
    return replace(
        cut,
        stages=numbers,
        remat=tuple(remat[label] for label in order),
        placement=placement,
    )


def _fragments(
    evaluator: Evaluator, stages: tuple[int, ...]
) -> Iterator[tuple[list[int], int]]:
    """Yield stages of works with one cut in two, and which: the new one is the last.

    The works apart are those that need values of fewer stages of others than the rest
    does, or those that no other stage waits for.
    """
    ancestors = evaluator.table.graph.ancestors
    members: dict[int, list[int]] = {}
    for work, stage in enumerate(stages):
        members.setdefault(stage, []).append(work)
    masks = {stage: sum(1 << work for work in own) for stage, own in members.items()}
    free = len(members)
    for stage, own in sorted(members.items()):
        if len(own) == 1:
            continue
        outside = ~masks[stage]
        needs = {work: ancestors[work] & outside for work in own}
        counts = {work: need.bit_count() for work, need in needs.items()}
        apart = [
            [work for work in own if counts[work] > bound]
            for bound in sorted({*counts.values()})[:-1]
        ]
        needed = 0
        for work, above in enumerate(ancestors):
            if stages[work] != stage:
                needed |= above
        apart.append([work for work in own if not needed >> work & 1])
        for works in apart:
            if 0 < len(works) < len(own):
                labels = [*stages]
                for work in works:
                    labels[work] = free
                yield labels, stage


def _placed(
    ranks: Mapping[int, int], num_ranks: int, focus: set[int]
) -> Iterator[dict[int, int]]:
    """Yield other ranks of the stages: one moved, or two exchanged."""
    for stage in sorted(focus):
        for rank in range(num_ranks):
            if rank != ranks[stage]:
                yield {**ranks, stage: rank}
        for other in ranks:
            if ranks[other] != ranks[stage]:
                yield {**ranks, stage: ranks[other], other: ranks[stage]}


def _focus(found: Evaluation) -> set[int]:
    """Return the stages to change: all of few, else the slowest and the fullest."""
    count = found.cut.num_stages
    if count <= 8:
        return set(range(count))
    seconds = found.costs.seconds
    loads = [seconds[stage, "F"] + seconds[stage, "B"] for stage in range(count)]
    slowest = sorted(range(count), key=lambda stage: -loads[stage])[:4]
    fullest = max(range(len(found.ranks)), key=lambda r: found.ranks[r].total)
    return {*slowest, *found.order.live_rows[fullest][0]}


def _relabelled(
    evaluator: Evaluator, stages: tuple[int, ...], focus: set[int]
) -> Iterator[list[int]]:
    """Yield stages of works after one change, valid or not."""
    edges = evaluator.table.graph.edges
    border = sorted(
        {(stages[p], stages[c]) for p, c in edges if stages[p] != stages[c]}
    )
    near = [pair for pair in border if focus & {*pair}]
    yield from _moved(edges, stages, focus)
    if len(stages) <= _SMALL:
        yield from _exchanged(edges, stages)
        yield from _any_stage(stages)
    for first, second in near:
        joined = [first if stage == second else stage for stage in stages]
        others = focus if len(stages) > _SMALL else set(joined)
        for stage in sorted({*others} & {*joined}):
            yield from _divided(joined, stage, second)


def _moved(
    edges: Sequence[tuple[int, int]], stages: tuple[int, ...], focus: set[int]
) -> Iterator[list[int]]:
    """Move each work at a border to the stage on the other side."""
    moves = set()
    for producer, consumer in edges:
        first, second = stages[producer], stages[consumer]
        if first != second and focus & {first, second}:
            moves |= {(producer, second), (consumer, first)}
    for work, stage in sorted(moves):
        yield [stage if place == work else old for place, old in enumerate(stages)]


def _any_stage(stages: tuple[int, ...]) -> Iterator[list[int]]:
    """Move each work to each stage, also one that it shares no value with."""
    for work, old in enumerate(stages):
        for stage in sorted({*stages} - {old}):
            yield [*stages[:work], stage, *stages[work + 1 :]]


def _exchanged(
    edges: Sequence[tuple[int, int]], stages: tuple[int, ...]
) -> Iterator[list[int]]:
    """Exchange two works of different stages."""
    for first in range(len(stages)):
        for second in range(first):
            if stages[first] != stages[second]:
                labels = [*stages]
                labels[first], labels[second] = labels[second], labels[first]
                yield labels


def _divided(labels: list[int], stage: int, free: int) -> Iterator[list[int]]:
    """Divide a stage at each place, in program order; the rest is named `free`."""
    places = [place for place, label in enumerate(labels) if label == stage]
    step = max(1, len(places) // 8)
    for cut in range(1, len(places), step):
        found = [*labels]
        for place in places[cut:]:
            found[place] = free
        yield found


def _key(cut: Cut) -> object:
    return cut.stages, cut.remat, cut.placement
