"""Improve a cut by small changes, as long as one helps.

A change moves a work over the border of its stage, exchanges two works, joins two
stages and divides another one, or changes what a stage computes again. Where the order
is listed, a rank may have any number of stages: then changes also cut a stage in two on
its rank, if some of its works need fewer values of other stages than the rest
(*fragments*), join two stages of a rank, and move stages to other ranks. Ranks that
differ exchange their stages whatever the order. Neighbours are
screened by an estimate of the step: the longest path of one microbatch, and the others
at the pace of the slowest rank.
"""

from bisect import insort
from collections.abc import Iterator, Sequence, Set
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_xla_pp.planner.evaluation import (
    Cut,
    Evaluation,
    Evaluator,
    Setting,
    renumbered,
    stage_sums,
    stage_times,
)
from torch_xla_pp.planner.orders import LIST_RULES, LISTED, SPLIT, OrderRule
from torch_xla_pp.planner.work_costs import Array

_ROUNDS = 30
# Of so few works, more changes are tried.
SMALL = 24
_FRAGMENTS = 3
# How far the estimate of a change may be above the step that it is to improve. It is
# seldom above the step that it is an estimate of, least of all with many works.
_SLACK = 1.05
_SLACK_OF_SMALL = 1.3
_NUM_TRIED = 6


def num_actions_of(cut: Cut) -> int:
    """Return about how many actions a step has."""
    return 3 * cut.num_stages * cut.setting.num_microbatches


def moved_from(
    evaluator: Evaluator,
    start: Evaluation,
    remat: Sequence[str],
    most_tried: int,
) -> tuple[Evaluation, int]:
    """Return the best cut that small changes lead to, and how many were tried.

    Args:
        evaluator: Evaluates cuts.
        start: The first cut; an order that is listed is made by the same rule, or is
            that of a builder.
        remat: What stages may choose of "none" and "full".
        most_tried: How many neighbours are evaluated at most.
    """
    best = start
    seen = {start.cut}
    is_small = evaluator.table.num_works <= SMALL and start.rule is None
    num_near = _NUM_TRIED
    if is_small:
        # Ranks that differ have more starts: one or more for each sequence.
        num_near *= 4 if evaluator.cluster.ranks else 10
    slack = _SLACK_OF_SMALL if evaluator.table.num_works <= SMALL else _SLACK
    left = most_tried
    rules: tuple[OrderRule, ...] = LIST_RULES
    if start.rule is not None:
        rules = (start.rule, *LIST_RULES[:2])
    for _ in range(_ROUNDS):
        changes = [*_changes(evaluator, best, remat)]
        more = [change for change in changes if len(change.ranks) > best.cut.num_stages]
        most_s = slack * best.step_s if best.fits else np.inf
        tried = _screened(evaluator, best.cut, changes, num_near, seen, most_s)
        known = {*seen, *tried}
        tried += _screened(evaluator, best.cut, more, _FRAGMENTS, known, most_s)
        if not tried or len(tried) > left:
            break
        left -= len(tried)
        seen.update(tried)
        found = _best_of(evaluator, best, tried, rules)
        if found is best:
            break
        best = found
    return best, len(seen) - 1


def _best_of(
    evaluator: Evaluator,
    best: Evaluation,
    cuts: Sequence[Cut],
    rules: tuple[OrderRule, ...],
) -> Evaluation:
    """Return the best of an evaluation and those of some cuts; the first of equals."""
    for cut in cuts:
        # Once a plan fits, one that takes longer is none.
        limit_s = best.step_s if best.fits else np.inf
        found = evaluator.evaluate_within(limit_s, cut, rules)
        if found is not None and found.sort_key < best.sort_key:
            best = found
    return best


def neighbours(
    evaluator: Evaluator, found: Evaluation, remat: Sequence[str]
) -> list[Cut]:
    """Return all cuts that differ by one change, the shortest estimates first."""
    changes = [*_changes(evaluator, found, remat)]
    return _screened(evaluator, found.cut, changes, len(changes), set())


def estimated_s(evaluator: Evaluator, cut: Cut) -> float:
    """Estimate a step: the longest path, then the slowest rank for the others.

    Times of stages on one rank add up, and with several of them a rank waits less.
    """
    setting, stages = cut.setting, cut.stages
    if setting.strategies:
        forward, inputs, weights, ends = _times_on_ranks(evaluator, cut)
    else:
        works = evaluator.works(setting.strategy, setting.rows)
        forward, inputs, weights = stage_times(works, cut)
        ends = stage_sums(cut, works.final_s(setting.replicas))
    loads = forward + inputs + weights
    late = setting.schedule in SPLIT
    path = (forward + inputs if late else loads).tolist()
    longest = path[:]
    pairs = {(stages[p], stages[c]) for p, c in evaluator.table.graph.edges}
    for producer, consumer in sorted(pairs, key=itemgetter(1)):
        if producer != consumer:
            through = longest[producer] + path[consumer]
            if through > longest[consumer]:
                longest[consumer] = through
    others = (setting.num_microbatches - 1) * loads + ends
    rest: float = max(np.bincount(cut.ranks, others).tolist())
    once: float = max(longest) / setting.stages_per_rank
    return once + rest


class _Change(NamedTuple):
    """A change of the stages of works, which are named by any labels.

    Args:
        labels: Label of each work's stage.
        ranks: Rank of each label.
        remat: What each label computes again.
    """

    labels: Sequence[int]
    ranks: tuple[int, ...]
    remat: tuple[str, ...]


def _changes(
    evaluator: Evaluator, found: Evaluation, remat: Sequence[str]
) -> Iterator[_Change]:
    """Yield all changes, valid or not."""
    cut = found.cut
    focus = _focus(found)
    ranks, own = cut.ranks, cut.remat
    for labels in _relabelled(evaluator, cut.stages, focus):
        yield _Change(labels, ranks, own)
    if cut.setting.schedule == LISTED:
        for labels, parent in _fragments(evaluator, cut.stages):
            yield _Change(labels, (*ranks, ranks[parent]), (*own, own[parent]))
        for stage in range(cut.num_stages):
            for other in range(stage):
                if ranks[stage] == ranks[other]:
                    joined = [other if at == stage else at for at in cut.stages]
                    yield _Change(joined, ranks, own)
        are_unlike = evaluator.cluster.network.links or evaluator.cluster.ranks
        if cut.num_stages > cut.setting.num_ranks or are_unlike:
            for moved in _placed(ranks, cut.setting.num_ranks, focus):
                yield _Change(cut.stages, moved, own)
    elif evaluator.cluster.ranks:
        for moved in _exchanged_ranks(ranks, cut.setting.num_ranks):
            yield _Change(cut.stages, moved, own)
    for stage in sorted(focus):
        for choice in remat:
            if choice != own[stage]:
                yield _Change(
                    cut.stages, ranks, (*own[:stage], choice, *own[stage + 1 :])
                )


def _screened(
    evaluator: Evaluator,
    cut: Cut,
    changes: Sequence[_Change],
    count: int,
    seen: Set[Cut],
    most_s: float = np.inf,
) -> list[Cut]:
    """Return the valid cuts with the shortest estimates, as many as are asked for.

    Changes are looked at in the order of a bound on their estimate, until the next one
    cannot be among the best.

    Args:
        evaluator: Evaluates cuts.
        cut: The cut that is changed.
        changes: The changes.
        count: How many to return at most.
        seen: Cuts to leave out.
        most_s: What an estimate may be.
    """
    if not changes:
        return []
    bounds = _bounds_s(evaluator, cut, changes)
    found: list[tuple[float, int, Cut]] = []
    known = {*seen}
    for number in np.argsort(bounds, kind="stable").tolist():
        if len(found) >= count:
            most_s = min(most_s, found[count - 1][0])
        if bounds[number] >= most_s:
            break
        other = _cut_of(evaluator, cut, changes[number])
        if other is not None and other not in known:
            known.add(other)
            seconds = estimated_s(evaluator, other)
            if seconds <= most_s:
                insort(found, (seconds, number, other))
    return [other for _, _, other in found[:count]]


def _bounds_s(evaluator: Evaluator, cut: Cut, changes: Sequence[_Change]) -> Array:
    """Return for each change a lower bound of `estimated_s`.

    That is the estimate with the longest path of works, or the slowest stage, in place
    of the longest path of stages.
    """
    setting = cut.setting
    count = max(len(change.ranks) for change in changes)
    labels = np.array([change.labels for change in changes])
    lines = np.arange(len(changes))[:, None]
    bins = (labels + lines * count).ravel()
    shape = len(changes), count

    def sums(sizes: Array) -> Array:
        spread = np.broadcast_to(sizes, labels.shape).ravel()
        found = np.bincount(bins, spread, shape[0] * count).astype(np.float64)
        return found.reshape(shape)

    again = np.zeros(shape)
    ranks = np.zeros(shape, dtype=int)
    for line, change in enumerate(changes):
        ranks[line, : len(change.ranks)] = change.ranks
        if "full" in change.remat:
            again[line, : len(change.remat)] = [r == "full" for r in change.remat]
    if setting.strategies:
        homes = ranks[lines, labels]
        forward, inputs, weights, ends = _on_ranks(evaluator, setting, homes)
        action_s, least = _action_times(evaluator, setting)[ranks], 0.0
    else:
        works = evaluator.works(setting.strategy, setting.rows)
        forward, inputs, weights = works.seconds
        ends = works.final_s(setting.replicas)
        action_s = np.array(works.cluster.device.action_s)
        least = works.longest_path_s(setting.schedule in SPLIT)
    path = sums(forward + inputs)
    path += again * sums(forward) + 2 * action_s * (sums(np.ones(len(labels[0]))) > 0)
    late = sums(weights)
    loads = path + late
    longest = path if setting.schedule in SPLIT else loads
    others = (setting.num_microbatches - 1) * loads + sums(ends)
    per_rank = setting.num_ranks
    at = (ranks + lines * per_rank).ravel()
    rest = np.bincount(at, others.ravel(), shape[0] * per_rank)
    once = np.maximum(longest.max(1), least) / setting.stages_per_rank
    found: Array = once + rest.reshape(-1, per_rank).max(1)
    # Sums in another order may be a little larger.
    return found * (1 - 1e-9)


def _times_on_ranks(
    evaluator: Evaluator, cut: Cut
) -> tuple[Array, Array, Array, Array]:
    """Return the times of F, I, W and the end of each stage, for ranks that differ.

    What makes values whole that stages send is left out.
    """
    homes = np.array(cut.ranks)[list(cut.stages)]
    own = _on_ranks(evaluator, cut.setting, homes)
    forward, inputs, weights, ends = (stage_sums(cut, sizes) for sizes in own)
    action_s = _action_times(evaluator, cut.setting)[list(cut.ranks)]
    again = forward * [remat == "full" for remat in cut.remat]
    return forward + action_s, inputs + action_s + again, weights, ends


def _action_times(evaluator: Evaluator, setting: Setting) -> Array:
    works = evaluator.works_of_ranks(setting)
    return np.array([own.cluster.device.action_s for own in works])


def _on_ranks(evaluator: Evaluator, setting: Setting, homes: NDArray[np.int_]) -> Array:
    """Return the times of F, I, W and the end of each work, on the rank that has it.

    Args:
        evaluator: Evaluates cuts.
        setting: A setting for ranks that differ.
        homes: Rank of each work, the last axis is for works.
    """
    known = evaluator.tables("times on ranks")
    key = setting.strategies, setting.rows, setting.replicas
    if key not in known:
        of_ranks = evaluator.works_of_ranks(setting)
        rows = [(*own.seconds, own.final_s(setting.replicas)) for own in of_ranks]
        known[key] = np.array(rows).transpose(1, 0, 2)
    found: Array = known[key][:, homes, np.arange(homes.shape[-1])]
    return found


def _cut_of(evaluator: Evaluator, cut: Cut, change: _Change) -> Cut | None:
    """Return the cut after a change, None if it is not valid."""
    used = {*change.labels}
    if len({change.ranks[label] for label in used}) < cut.setting.num_ranks:
        return None
    if cut.setting.schedule != LISTED and len(used) != cut.num_stages:
        return None
    numbers = renumbered(change.labels, evaluator.table.graph.edges)
    if numbers is None:
        return None
    found = dict(zip(numbers, change.labels, strict=True))
    order = [found[number] for number in range(len(found))]
    placement = tuple(change.ranks[label] for label in order) if cut.placement else ()
    is_one_each = len(placement) == cut.setting.num_ranks
    are_unlike = evaluator.cluster.network.links or evaluator.cluster.ranks
    if is_one_each and not are_unlike:
        placement = tuple(range(len(placement)))  # Ranks are all equal.
    found_cut = Cut(
        setting=cut.setting,
        stages=numbers,
        remat=tuple(change.remat[label] for label in order),
        placement=placement,
    )
    is_listed = cut.setting.schedule == LISTED
    return found_cut if is_listed or found_cut.sequence is not None else None


def _fragments(
    evaluator: Evaluator, stages: tuple[int, ...]
) -> Iterator[tuple[list[int], int]]:
    """Yield stages of works with one cut in two, and its index; the new one is last.

    The works that are cut off need values of fewer other stages than the rest does, or
    no other stage waits for them.
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
    ranks: tuple[int, ...], num_ranks: int, focus: set[int]
) -> Iterator[tuple[int, ...]]:
    """Yield other placements of the stages: one moved, or two exchanged."""
    for stage in sorted(focus):
        for rank in range(num_ranks):
            if rank != ranks[stage]:
                yield (*ranks[:stage], rank, *ranks[stage + 1 :])
        for other in range(len(ranks)):
            if ranks[other] != ranks[stage]:
                moved = [*ranks]
                moved[stage], moved[other] = ranks[other], ranks[stage]
                yield tuple(moved)


def _exchanged_ranks(
    ranks: tuple[int, ...], num_ranks: int
) -> Iterator[tuple[int, ...]]:
    """Yield placements in which two ranks have each other's stages."""
    for first in range(num_ranks):
        for second in range(first):
            names = {first: second, second: first}
            yield tuple(names.get(rank, rank) for rank in ranks)


def _focus(found: Evaluation) -> set[int]:
    """Return the stages to change: all of few, else the slowest and the fullest."""
    count = found.cut.num_stages
    if count <= 8:
        return set(range(count))
    seconds = found.costs.seconds
    loads = [seconds[stage, "F"] + seconds[stage, "B"] for stage in range(count)]
    slowest = sorted(range(count), key=lambda stage: -loads[stage])[:4]
    fullest = max(range(len(found.ranks)), key=lambda r: found.ranks[r].total)
    return {*slowest, *found.order.live_rows[fullest][0].tolist()}


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
    if len(stages) <= SMALL:
        yield from _exchanged(stages)
        yield from _any_stage(stages)
    for first, second in near:
        joined = [first if stage == second else stage for stage in stages]
        others = focus if len(stages) > SMALL else set(joined)
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
    """Move each work to each stage, also to one that it shares no value with."""
    for work, old in enumerate(stages):
        for stage in sorted({*stages} - {old}):
            yield [*stages[:work], stage, *stages[work + 1 :]]


def _exchanged(stages: tuple[int, ...]) -> Iterator[list[int]]:
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
