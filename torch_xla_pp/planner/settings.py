"""The choices of a plan besides the stages, and the order in which to try them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

from torch_xla_pp.planner.evaluation import Evaluator, Setting
from torch_xla_pp.planner.orders import LISTED, MULTI, SCHEDULES, takes
from torch_xla_pp.planner.rank_strategies import (
    combined_strategies,
    fits_rules,
    repeats,
)
from torch_xla_pp.planner.strategies import PRESETS, Strategy, strategies_for
from torch_xla_pp.planner.work_costs import WorkTable

PlannerName = Literal["full", "spp", "graphpipe", "pipedream"]
PLANNERS: tuple[PlannerName, ...] = get_args(PlannerName)
_MOST_ACTIONS = 60_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request for a plan; None leaves a choice to the planner.

    Args:
        rows: Rows of a step, those of all replicas.
        num_ranks: Ranks of all replicas.
        devices_per_rank: Devices of each rank.
        replicas: Numbers of replicas to try.
        microbatches: Numbers of microbatches to try.
        stages_per_rank: Numbers of stages to try where a schedule takes several.
        schedules: Orders of actions to try.
        presets: Ways to share a rank's work to try.
        meshes: Sizes of the axes data and model to try.
        remat: What stages may choose.
        planner: The search: "full", or one that it is compared with.
        stages: Stage of each work, if that is given.
        counts: Devices of each rank, those of all replicas, if they differ.
        strategies: How the devices of each rank share its work, likewise, if that is
            given; presets and meshes do not count then.

    Raises:
        ValueError: A name is unknown or a count below one; all faults are listed.
    """

    rows: int
    num_ranks: int | None = None
    devices_per_rank: int | None = None
    replicas: tuple[int, ...] | None = None
    microbatches: tuple[int, ...] | None = None
    stages_per_rank: tuple[int, ...] = (2,)
    schedules: tuple[str, ...] = (
        "1f1b",
        "zb1p",
        "dag",
        "interleaved",
        "zbv",
        "list",
    )
    presets: tuple[str, ...] = PRESETS
    meshes: tuple[tuple[int, int], ...] | None = None
    remat: tuple[str, ...] = ("none", "full")
    planner: PlannerName = "full"
    stages: tuple[int, ...] | None = None
    counts: tuple[int, ...] = ()
    strategies: tuple[Strategy, ...] = ()

    @property
    def num_given_stages(self) -> int | None:
        """Number of the stages that are given, None if they are not."""
        return None if self.stages is None else max(self.stages) + 1

    def __post_init__(self) -> None:
        faults = []
        for what, names, known in (
            ("schedules", self.schedules, SCHEDULES),
            ("sharding", self.presets, PRESETS),
            ("remat", self.remat, ("none", "full")),
            ("planner", (self.planner,), PLANNERS),
        ):
            unknown = [name for name in names if name not in known]
            if unknown or not names:
                got = ", ".join(unknown) or "none"
                faults.append(f"{what}: expected some of {', '.join(known)}, got {got}")
        counts = {
            "rows": (self.rows,),
            "ranks": (self.num_ranks,),
            "devices per rank": (self.devices_per_rank, *self.counts),
            "replicas": self.replicas or (),
            "microbatches": self.microbatches or (),
            "stages per rank": self.stages_per_rank,
        }
        faults += [
            f"{name}: expected counts of at least 1, got {count}"
            for name, given in counts.items()
            for count in given
            if count is not None and count < 1
        ]
        if faults:
            raise ValueError("\n".join(f"plan, {f}. Correct it." for f in faults))


def settings_for(request: Request, evaluator: Evaluator) -> list[Setting]:
    """Return all allowed settings that use the devices of the cluster.

    Raises:
        ValueError: There are none; the text gives the reason.
    """
    found = [*_settings(request, evaluator)]
    if not found:
        raise ValueError(_why_none(request, evaluator))
    return found


def _settings(request: Request, evaluator: Evaluator) -> Iterator[Setting]:
    is_chain = _is_chain(evaluator)
    for num_ranks, replicas, per_rank in _shapes(request, evaluator):
        for own in _shared(request, evaluator, num_ranks, replicas, per_rank):
            for rows, count in _row_counts(request, replicas, num_ranks, own):
                if not all(evaluator.table.takes(rows / s.data) for s in own):
                    continue
                for name, stages in _families(request, is_chain):
                    setting = Setting(
                        num_ranks=num_ranks,
                        replicas=replicas,
                        strategy=own[0],
                        rows=rows,
                        num_microbatches=count,
                        schedule=name,
                        stages_per_rank=stages,
                        strategies=own if evaluator.cluster.ranks else (),
                    )
                    if request.num_given_stages not in (None, setting.num_stages):
                        continue
                    is_given = request.microbatches is not None
                    if not is_given and _num_actions(setting) > _MOST_ACTIONS:
                        continue
                    if _is_possible(setting, evaluator.table.num_works):
                        yield setting


def _shared(
    request: Request, evaluator: Evaluator, ranks: int, replicas: int, per_rank: int
) -> Iterator[tuple[Strategy, ...]]:
    """Yield the strategy of all ranks of a pipeline, or of each if they differ."""
    if evaluator.cluster.ranks:
        if own := request.strategies[:ranks]:
            yield from [own] if all(fits_rules(evaluator, s) for s in own) else []
            return
        rows = max(1, request.rows // (2 * ranks * replicas))
        yield from combined_strategies(
            evaluator, ranks, request.presets, request.meshes, rows
        )
        return
    for strategy in strategies_for(per_rank, request.presets):
        mesh = strategy.data, strategy.model
        if request.meshes is not None and mesh not in request.meshes:
            continue
        if fits_rules(evaluator, strategy):
            yield (strategy,)


def _shapes(request: Request, evaluator: Evaluator) -> Iterator[tuple[int, int, int]]:
    """Yield ranks of a pipeline, replicas and devices of a rank, the most of any."""
    total = evaluator.cluster.num_devices
    if unlike := evaluator.cluster.ranks:
        most = max(rank.count for rank in unlike)
        for replicas in _divisors(len(unlike)):
            if request.replicas is None or replicas in request.replicas:
                if repeats([*unlike], replicas) and repeats(
                    request.strategies, replicas
                ):
                    yield len(unlike) // replicas, replicas, most
        return
    for per_rank in _divisors(total):
        if request.devices_per_rank not in (None, per_rank):
            continue
        ranks = total // per_rank
        if request.num_ranks not in (None, ranks):
            continue
        for replicas in _divisors(ranks):
            if request.replicas is None or replicas in request.replicas:
                yield ranks // replicas, replicas, per_rank


def _row_counts(
    request: Request, replicas: int, num_ranks: int, strategies: Sequence[Strategy]
) -> Iterator[tuple[int, int]]:
    """Yield rows of a microbatch and numbers of microbatches."""
    own, rest = divmod(request.rows, replicas)
    if rest:
        return
    for count in _divisors(own):
        rows = own // count
        if any(rows % strategy.data for strategy in strategies):
            continue
        if request.microbatches is not None and count not in request.microbatches:
            continue
        if request.microbatches is None and not _is_sensible(count, num_ranks, own):
            continue
        yield rows, count


def _is_sensible(count: int, num_ranks: int, own_rows: int) -> bool:
    """Return whether so many microbatches are worth trying: not few, not very many."""
    return min(num_ranks, own_rows) <= count <= max(64, 16 * num_ranks)


def _families(request: Request, is_chain: bool) -> Iterator[tuple[str, int]]:
    """Yield schedules with their stages on a rank."""
    for name in request.schedules:
        if name == "zbv":
            yield name, 2
        elif name == LISTED:
            for stages in sorted({1, *request.stages_per_rank}):
                yield name, stages
        elif name in MULTI:
            for stages in request.stages_per_rank:
                if stages > 1:
                    yield name, stages
        # On a chain it is the same as 1F1B.
        elif name != "dag" or not is_chain or "1f1b" not in request.schedules:
            yield name, 1


def _is_possible(setting: Setting, num_works: int) -> bool:
    count, ranks = setting.num_microbatches, setting.num_ranks
    if ranks == 1 and setting.schedule not in ("1f1b", "gpipe"):
        return False
    if setting.num_stages > num_works:
        return False
    name = setting.schedule
    if name == LISTED and setting.stages_per_rank > 1:
        name = "interleaved"  # Its cuts are found with these.
    return takes(name, ranks, count)


def _num_actions(setting: Setting) -> int:
    """Return how many actions a step has at most."""
    return 3 * setting.num_microbatches * setting.num_stages


def _is_chain(evaluator: Evaluator) -> bool:
    """Return whether no two works could run at the same time."""
    ancestors = evaluator.table.graph.ancestors
    return all(found == (1 << place) - 1 for place, found in enumerate(ancestors))


def _why_none(request: Request, evaluator: Evaluator) -> str:
    """Return the error with the numbers that do not match, and near ones that do."""
    total, unlike = evaluator.cluster.num_devices, evaluator.cluster.ranks
    if not [*_shapes(request, evaluator)] and unlike:
        kinds = [f"{rank}" for rank in unlike]
        if request.strategies:
            pairs = zip(kinds, request.strategies, strict=True)
            kinds = [f"{kind} {strategy.text}" for kind, strategy in pairs]
        return (
            "plan: expected replicas with the same sequence of ranks each, got "
            f"replicas {_counts(request.replicas or ())} of {len(unlike)} ranks with "
            f"{', '.join(kinds)}. Repeat the first ranks for each "
            "replica, or take other replicas."
        )
    if not [*_shapes(request, evaluator)]:
        return (
            f"plan: expected ranks, devices per rank and replicas that make {total} "
            f"devices, got ranks {request.num_ranks}, devices per rank "
            f"{request.devices_per_rank}, replicas {request.replicas}. Divisors of "
            f"{total} are {', '.join(map(str, _divisors(total)))}."
        )
    if evaluator.table.rules is not None and any(
        _settings(request, _without_rules(evaluator))
    ):
        per_rank = _listed([*_shapes(request, evaluator)], 2)
        return (
            "plan: rules: expected some way to share a rank's work in which mesh axes "
            "divide the dimensions that the rules name, got none of "
            f"{', '.join(request.presets)} with {per_rank} devices per rank. "
            "Change the devices per rank, or the patterns."
        )
    measured = evaluator.table.measured
    if measured is not None and [*_settings(request, _by_roofline(evaluator))]:
        least, most = measured.range
        return (
            f"plan: costs were measured with {_counts(measured.rows)} rows: expected "
            f"microbatches of {least} to {most} rows on a device, got none of "
            f"{request.rows} rows and {_counts(request.microbatches or ())} "
            "microbatches. Measure with other rows, or plan others."
        )
    works = evaluator.table.num_works
    shapes = [*_shapes(request, evaluator)]
    if request.stages is not None and any(
        _settings(replace(request, stages=None), evaluator)
    ):
        return (
            f"plan: expected ranks and stages per rank that make the "
            f"{request.num_given_stages} given stages, got pipelines of "
            f"{_listed(shapes, 0)} ranks, {', '.join(request.schedules)} and, where "
            f"these take several, {', '.join(map(str, request.stages_per_rank))} "
            "stages per rank. Change these, replicas, or the stages."
        )
    divided = [ranks for ranks, r, _ in shapes if not request.rows % r]
    least = min(divided, default=0)
    if least > works:
        return (
            f"plan: expected at most {works} ranks in a pipeline, as the model has so "
            f"many works, got {least}. Take fewer ranks, or more replicas or devices "
            "per rank."
        )
    own = sorted({request.rows // r for _, r, _ in shapes if not request.rows % r})
    numbers = sorted({d for rows in own for d in _divisors(rows)})
    near = _nearest_rows(request, evaluator, shapes)
    change = f"take {near} rows" if near else "change the rows"
    if counts := _nearest_counts(request, evaluator):
        return (
            f"plan: expected a number of microbatches that divides the rows of a "
            f"replica, {', '.join(map(str, own))}, and that a schedule of "
            f"{', '.join(request.schedules)} takes, got "
            f"{', '.join(map(str, request.microbatches or ()))}. The nearest that work "
            f"are {', '.join(map(str, counts))}; or {change}."
        )
    return (
        f"plan: expected {request.rows} rows that replicas {_listed(shapes, 1)}, "
        f"microbatches {request.microbatches or 'of any number'} and the devices that "
        f"split a batch (up to {max(n for _, _, n in shapes)}) divide, and schedules "
        f"{', '.join(request.schedules)} that take them, got no setting that does. "
        "Numbers of microbatches that divide the rows of a replica are "
        f"{', '.join(map(str, numbers)) or 'none'}; {change}, or allow more."
    )


def _by_roofline(evaluator: Evaluator) -> Evaluator:
    table = WorkTable(evaluator.table.graph, rules=evaluator.table.rules)
    return replace(evaluator, table=table)


def _without_rules(evaluator: Evaluator) -> Evaluator:
    table = WorkTable(evaluator.table.graph, evaluator.table.measured)
    return replace(evaluator, table=table)


def _counts(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "any number of"


def _nearest_counts(request: Request, evaluator: Evaluator) -> list[int]:
    """Return the possible numbers of microbatches next to the requested ones."""
    if request.microbatches is None:
        return []
    asked = request.microbatches[0]
    free = replace(request, microbatches=tuple(range(1, 2 * asked + 64)))
    taken = {setting.num_microbatches for setting in _settings(free, evaluator)}
    return sorted(sorted(taken, key=lambda count: (abs(count - asked), count))[:4])


def _nearest_rows(
    request: Request, evaluator: Evaluator, shapes: Sequence[tuple[int, int, int]]
) -> int | None:
    """Return the number of rows next to the requested one that has a setting."""
    near = set()
    for (ranks, replicas, per_rank), count in product(
        shapes, request.microbatches or (0,)
    ):
        for data in _divisors(per_rank):
            unit = replicas * data * (count or ranks)
            less = request.rows // unit * unit
            near |= {less, less + unit} - {0}
    for rows in sorted(near, key=lambda rows: (abs(rows - request.rows), rows)):
        if any(_settings(replace(request, rows=rows), evaluator)):
            return rows
    return None


def _listed(shapes: list[tuple[int, int, int]], item: int) -> str:
    return ", ".join(map(str, sorted({shape[item] for shape in shapes})))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if not number % d]
