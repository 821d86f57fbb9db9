"""Improve a cut by small changes, as long as one helps.

A change moves a work over the border of its stage, exchanges two works, joins two
stages and divides another one, or changes what a stage computes again. Neighbours are
screened by an estimate of the step: the longest path of one microbatch, and the
others at the pace of the slowest stage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from torch_xla_pp.planner.evaluation import (
    Cut,
    Evaluation,
    Evaluator,
    renumbered,
    stage_times,
)

_ROUNDS = 30
_SMALL = 24


def improved(
    evaluator: Evaluator, start: Evaluation, remat: Sequence[str], num_tried: int = 6
) -> Evaluation:
    """Return the best cut that small changes lead to.

    Args:
        evaluator: What evaluates cuts.
        start: Where to begin.
        remat: What stages may choose of "none" and "full".
        num_tried: How many neighbours of each cut are evaluated after screening.
    """
    best = start
    seen = {_key(start.cut)}
    for _ in range(_ROUNDS):
        near = [c for c in neighbours(evaluator, best, remat) if _key(c) not in seen]
        if not near:
            break
        near.sort(key=lambda cut: estimated_s(evaluator, cut))
        is_small = evaluator.table.num_works <= _SMALL
        tried = near[: 10 * num_tried if is_small else num_tried]
        seen.update(map(_key, tried))
        found = min(map(evaluator.evaluate, tried), key=lambda e: e.sort_key)
        if not found.sort_key < best.sort_key:
            break
        best = found
    return best


def estimated_s(evaluator: Evaluator, cut: Cut) -> float:
    """Estimate a step: the longest path, then the slowest rank for the others.

    Stages of one rank add up, and with several of them a rank waits less.
    """
    setting = cut.setting
    works = evaluator.works(setting.strategy, setting.rows)
    forward, inputs, weights = stage_times(works, cut)
    loads = forward + inputs + weights
    if setting.schedule in ("zb1p", "zbv"):
        weights = np.zeros_like(weights)
    path = (forward + inputs + weights).tolist()
    longest = path[:]
    pairs = {(cut.stages[p], cut.stages[c]) for p, c in evaluator.table.graph.edges}
    for producer, consumer in sorted(pairs, key=lambda pair: pair[1]):
        if producer != consumer:
            through = longest[producer] + path[consumer]
            longest[consumer] = max(longest[consumer], through)
    count = setting.num_ranks
    if setting.schedule == "zbv":
        heaviest = float((loads[:count] + loads[: count - 1 : -1]).max())
    else:
        heaviest = float(loads.reshape(-1, count).sum(0).max())
    once: float = max(longest) / setting.stages_per_rank
    return once + (setting.num_microbatches - 1) * heaviest


def neighbours(
    evaluator: Evaluator, found: Evaluation, remat: Sequence[str]
) -> Iterator[Cut]:
    """Yield cuts that differ a little, all of them valid."""
    cut, edges = found.cut, evaluator.table.graph.edges
    focus = _focus(found)
    yielded = set()
    for labels in _relabelled(evaluator, cut.stages, focus):
        numbers = renumbered(labels, edges)
        if numbers is None or max(numbers) + 1 != cut.setting.num_stages:
            continue
        kept = _remat_of(labels, numbers, cut.remat)
        changed = replace(cut, stages=numbers, remat=kept)
        if _key(changed) not in yielded:
            yielded.add(_key(changed))
            yield changed
    for stage in sorted(focus):
        for choice in remat:
            if choice != cut.remat[stage]:
                other = [*cut.remat]
                other[stage] = choice
                yield replace(cut, remat=tuple(other))


def _focus(found: Evaluation) -> set[int]:
    """Return the stages to change: all of few, else the slowest and the fullest."""
    count = found.cut.setting.num_stages
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


def _remat_of(
    labels: Sequence[int], numbers: Sequence[int], remat: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the choices of stages after they were numbered anew."""
    found = dict(zip(numbers, labels, strict=True))
    return tuple(remat[found[number]] for number in sorted(found))


def _key(cut: Cut) -> tuple[tuple[int, ...], tuple[str, ...]]:
    return cut.stages, cut.remat
