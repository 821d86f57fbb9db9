"""Ranks that differ: the devices of each, and how they may share its stages."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import TypeVar

from torch_xla_pp.planner.devices import DeviceSpec, RankDevices
from torch_xla_pp.planner.evaluation import Evaluator
from torch_xla_pp.planner.strategies import Strategy, strategies_for
from torch_xla_pp.planner.work_costs import WorkCosts

_T = TypeVar("_T")
_Strategies = tuple[Strategy, ...]
# All combinations of strategies are tried if there are no more.
_MOST_COMBINATIONS = 64


def devices_of_ranks(
    ranks: int | None,
    devices: Sequence[DeviceSpec],
    counts: Sequence[int],
    strategies: Sequence[Strategy] | None,
) -> tuple[RankDevices, ...]:
    """Return the devices of each rank, () if all ranks are equal.

    Args:
        ranks: Number of ranks.
        devices: Their kind of devices, one or one for each.
        counts: Their number of devices, likewise.
        strategies: How each shares its work, if that is given.

    Raises:
        ValueError: There are not as many as ranks, or strategies for other numbers of
            devices; all faults are listed.
    """
    names = [device.name for device in devices]
    faults = [
        *_count_faults("device", names, ranks, (1, ranks)),
        *_count_faults("devices per rank", counts, ranks, (1, ranks)),
        *_count_faults("rank sharding", strategies or (), ranks, (0, ranks)),
        *(
            f"devices per rank: expected a count, got {count!r}. Give a whole number."
            for count in counts
            if not isinstance(count, int)
        ),
    ]
    if not faults:
        number = ranks or 1
        kinds = zip(_each(devices, number), _each(counts, number), strict=True)
        found = tuple(RankDevices(device=kind, count=count) for kind, count in kinds)
        faults = [*_mesh_faults(found, strategies or ())]
    if faults:
        raise ValueError("\n".join(f"plan, {fault}" for fault in faults))
    return found if strategies or len({*found}) > 1 else ()


def _count_faults(
    what: str, given: Sequence[object], ranks: int | None, counts: Sequence[int | None]
) -> Iterator[str]:
    if len(given) not in counts:
        one = "one, or " if 1 in counts else ""
        end = " one, or" if one else ""
        yield (
            f"{what}: expected {one}one for each of the ranks "
            f"({'of which no number is given' if ranks is None else ranks}), got "
            f"{len(given)}: {', '.join(map(str, given))}. Give{end} as many as ranks."
        )


def _mesh_faults(
    ranks: Sequence[RankDevices], strategies: Sequence[Strategy]
) -> Iterator[str]:
    for number, strategy in enumerate(strategies):
        count = ranks[number].count
        if strategy.num_devices != count:
            yield (
                f"rank sharding: expected a mesh of the {count} devices of rank "
                f"{number}, got {strategy.text}. Change its mesh, or devices per rank."
            )


def _each(items: Sequence[_T], count: int) -> Sequence[_T]:
    return [*items] * count if len(items) == 1 else items


def repeats(items: Sequence[object], count: int) -> bool:
    """Return whether these are the first of them, repeated so many times."""
    own, rest = divmod(len(items), count)
    return not rest and [*items[:own]] * count == [*items]


def combined_strategies(
    evaluator: Evaluator,
    num_ranks: int,
    presets: Sequence[str],
    meshes: Sequence[tuple[int, int]] | None,
    rows: int,
) -> list[_Strategies]:
    """Return strategies of each rank of a pipeline; equal ranks have the same.

    Of many combinations, those remain in which each rank has one of its fastest, or
    the one that takes the least memory.

    Args:
        evaluator: Evaluates cuts, on a cluster whose ranks differ.
        num_ranks: Ranks of a pipeline.
        presets: Ways to share a rank's work.
        meshes: Sizes of the axes data and model, None for any.
        rows: About as many rows as a microbatch has.

    Raises:
        ValueError: A rank has no strategy; all such are named.
    """
    ranks = evaluator.cluster.ranks[:num_ranks]
    choices = {
        rank: [
            strategy
            for strategy in strategies_for(rank.count, presets)
            if meshes is None or (strategy.data, strategy.model) in meshes
        ]
        for rank in ranks
    }
    if faults := [*_choice_faults(ranks, choices, presets)]:
        raise ValueError("\n".join(faults))
    fitting = {
        rank: [own for own in choices[rank] if fits_rules(evaluator, own)]
        for rank in choices
    }
    if prod(map(len, fitting.values())) > _MOST_COMBINATIONS:
        _keep_best(evaluator, fitting, rows)
    found = []
    for combination in product(*fitting.values()):
        own = dict(zip(fitting, combination, strict=True))
        found.append(tuple(own[rank] for rank in ranks))
    return found


def _choice_faults(
    ranks: Sequence[RankDevices],
    choices: dict[RankDevices, list[Strategy]],
    presets: Sequence[str],
) -> Iterator[str]:
    for number, rank in enumerate(ranks):
        if not choices[rank]:
            yield (
                f"plan: expected a mesh for the {rank.count} devices of rank {number} "
                f"with {', '.join(presets)}, got none. Name one in meshes, or more "
                "presets in sharding."
            )


def fits_rules(evaluator: Evaluator, strategy: Strategy) -> bool:
    """Return whether a strategy divides the dimensions that rules split, if any."""
    split = evaluator.table.by_rules(strategy)
    return split is None or split.fit()


def _keep_best(
    evaluator: Evaluator, choices: dict[RankDevices, list[Strategy]], rows: int
) -> None:
    """Leave out slow strategies, until there are few combinations."""
    for rank, own in choices.items():
        costs = {strategy: _costs(evaluator, rank, strategy, rows) for strategy in own}
        least = min(own, key=lambda strategy: costs[strategy][1], default=None)
        choices[rank] = sorted(own, key=lambda s: (s != least, costs[s][0]))
    while prod(map(len, choices.values())) > _MOST_COMBINATIONS:
        most = max(choices.values(), key=len)
        if len(most) == 1:
            break
        most.pop()


def _costs(
    evaluator: Evaluator, rank: RankDevices, strategy: Strategy, rows: int
) -> tuple[float, float]:
    """Return the time and the parameters of all works on a rank."""
    works = WorkCosts(
        evaluator.table,
        evaluator.cluster.of_device(rank.device),
        strategy,
        rows,
        evaluator.optimizer_bytes,
    )
    seconds = sum(float(own.sum()) for own in works.seconds)
    return seconds, float(works.parameter_bytes.sum())
