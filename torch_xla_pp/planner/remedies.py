"""The error when nothing fits: what is missing, and what would help."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch_xla_pp.planner.evaluation import Evaluation, Evaluator
from torch_xla_pp.planner.report import memory_table
from torch_xla_pp.planner.search import SearchResult, best_of, search
from torch_xla_pp.planner.settings import Request
from torch_xla_pp.planner.strategies import PRESETS
from torch_xla_pp.text import bytes_text, seconds_text

# Factors of more ranks and fewer rows that are tried to find what fits; of many
# devices, whose searches take longest, only the least.
_FACTORS = (2, 4, 8)
_MANY_DEVICES = 128

Remedy = tuple[str, Request, Evaluator]


def nothing_fits(request: Request, evaluator: Evaluator, result: SearchResult) -> str:
    """Return the error with what the nearest plan lacks, and what would help."""
    lines = []
    if result.best:
        lines += _least_lines(best_of(result), request)
    else:
        some = evaluator.cluster.capacities(len(evaluator.cluster.ranks) or 1)
        sizes = " or ".join(map(bytes_text, sorted({*some})))
        lines.append(
            f"plan: expected stages that fit {sizes} of a device, got "
            f"none from planner {request.planner}."
        )
    effects = [_effect_text(steps) for steps in _remedies(request, evaluator)]
    if found := [f"  {effect}" for effect in effects if effect]:
        lines += ["Of these, in order, change what helps:", *found]
    else:
        lines.append("Take devices with more memory, or a smaller model.")
    return "\n".join(lines)


def _least_lines(best: Evaluation, request: Request) -> list[str]:
    given = "" if request.stages is None else ", the given stages"
    number = _fullest(best)
    held, setting = best.ranks[number], best.cut.setting
    sharding = ", ".join(strategy.text for strategy in setting.strategies)
    return [
        f"plan: expected a plan that fits {bytes_text(best.capacities[number])} of a "
        f"device, got at least {bytes_text(held.total)} on rank {number} "
        f"({bytes_text(held.state)} state, {bytes_text(held.saved + held.passed)} "
        f"saved, {bytes_text(held.outputs)} outputs, {bytes_text(held.temporary)} "
        f"temporary), with {setting.num_ranks} ranks, {sharding or setting.strategy}, "
        f"{setting.num_microbatches} microbatches of {setting.rows} rows, "
        f"{setting.schedule}{given}:",
        *(f"  {line}" for line in memory_table(best.ranks, best.capacities)),
    ]


def _fullest(best: Evaluation) -> int:
    """Return the rank whose devices lack most, or have least left."""
    lacking = best.lacking_bytes
    return max(range(len(lacking)), key=lambda rank: lacking[rank])


def _effect_text(steps: Sequence[Remedy]) -> str | None:
    """Describe the first change that fits, or the last one that is possible."""
    text = None
    for label, request, evaluator in steps:
        try:
            found = search(request, evaluator)
        except ValueError:
            continue
        if not found.best:
            continue
        best = best_of(found)
        held = bytes_text(best.ranks[_fullest(best)].total)
        if best.fits:
            return f"{label}: fits with {held}, {seconds_text(best.step_s)} a step"
        text = f"{label}: still needs {held}"
    return text


def _remedies(request: Request, evaluator: Evaluator) -> Iterator[list[Remedy]]:
    """Yield changes that may help, each from a small to a large one."""
    is_large = evaluator.cluster.num_devices > _MANY_DEVICES
    factors = _FACTORS[:1] if is_large else _FACTORS
    if request.stages is not None:
        yield [("other stages", replace(request, stages=None), evaluator)]
    if "full" not in request.remat:
        allowed = replace(request, remat=("none", "full"))
        yield [("allow remat full", allowed, evaluator)]
    if not evaluator.cluster.ranks:
        yield [_more_ranks(request, evaluator, factor) for factor in factors]
    if set(request.presets) != set(PRESETS) or request.strategies:
        allowed = replace(request, presets=PRESETS, meshes=None, strategies=())
        yield [("allow dp, fsdp and tp", allowed, evaluator)]
    if request.devices_per_rank is not None and not evaluator.cluster.ranks:
        yield [_more_devices(request, evaluator, factor) for factor in factors]
    if request.microbatches is not None:
        free = replace(request, microbatches=None)
        yield [("allow any number of microbatches", free, evaluator)]
    halves = [factor for factor in factors if not request.rows % factor]
    yield [_fewer_rows(request, evaluator, factor) for factor in halves]


def _more_ranks(request: Request, evaluator: Evaluator, factor: int) -> Remedy:
    count = None if request.num_ranks is None else factor * request.num_ranks
    asked = replace(request, num_ranks=count, replicas=None, stages=None)
    what = "devices" if request.num_ranks is None else "ranks"
    label = f"{'twice' if factor == 2 else f'{factor} times'} the {what}"
    return label, asked, _with_devices(evaluator, factor)


def _more_devices(request: Request, evaluator: Evaluator, factor: int) -> Remedy:
    """Take more devices for each rank, and split its parameters, too."""
    count = factor * (request.devices_per_rank or 1)
    asked = replace(
        request, devices_per_rank=count, presets=PRESETS, meshes=None, num_ranks=None
    )
    label = f"{count} devices per rank, with dp, fsdp and tp"
    return label, asked, _with_devices(evaluator, factor)


def _fewer_rows(request: Request, evaluator: Evaluator, factor: int) -> Remedy:
    rows = request.rows // factor
    fewer = replace(request, rows=rows, microbatches=None)
    return f"{rows} rows a step", fewer, evaluator


def _with_devices(evaluator: Evaluator, factor: int) -> Evaluator:
    cluster = evaluator.cluster
    more = replace(cluster, num_devices=factor * cluster.num_devices)
    return replace(evaluator, cluster=more)
