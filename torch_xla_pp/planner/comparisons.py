"""The reasons for a plan: the best plans in which one choice differs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch_xla_pp.planner.evaluation import Evaluation, Evaluator, Setting
from torch_xla_pp.planner.plan_values import Alternative
from torch_xla_pp.planner.search import balanced_seconds, best_of, search
from torch_xla_pp.planner.settings import Request
from torch_xla_pp.text import bytes_text, seconds_text


def pinned(request: Request, best: Evaluation) -> Request:
    """Return the request with every choice of a plan given."""
    setting = best.cut.setting
    strategy = setting.strategy
    if setting.strategies:
        request = replace(request, strategies=setting.strategies * setting.replicas)
    else:
        request = replace(
            request,
            devices_per_rank=strategy.num_devices,
            presets=strategy.presets or request.presets,
            meshes=((strategy.data, strategy.model),),
        )
    return replace(
        request,
        num_ranks=setting.num_ranks * setting.replicas,
        replicas=(setting.replicas,),
        microbatches=(setting.num_microbatches,),
        schedules=(setting.schedule,),
        stages_per_rank=(setting.stages_per_rank,),
    )


def other_plans(
    request: Request, evaluator: Evaluator, best: Evaluation
) -> Iterator[tuple[str, Evaluation, Request]]:
    """Yield choices that could be different, with the best plan in which they are."""
    own, mine = pinned(request, best), best.cut.setting
    for change, asked in _changes(request, own, best):

        def differs(setting: Setting, change: str = change) -> bool:
            return not _is_same(change, setting, mine)

        try:
            found = search(asked, evaluator, differs, has_moves=change == "schedule")
        except ValueError:
            continue
        if found.best:
            again = replace(
                pinned(asked, best_of(found)),
                remat=asked.remat,
                stages_per_rank=asked.stages_per_rank,
            )
            yield change, best_of(search(again, evaluator)), again


def with_other_stages(
    request: Request, evaluator: Evaluator, best: Evaluation
) -> tuple[str, Evaluation, Request] | None:
    """Return the best plan with the given stages left free, and all else as planned."""
    asked = replace(pinned(request, best), stages=None)
    found = search(asked, evaluator)
    return ("stages", best_of(found), asked) if found.best else None


def alternative_of(change: str, other: Evaluation, request: Request) -> Alternative:
    """Describe a plan in which one choice differs, and the options for it."""
    return Alternative(
        label=_label(change, other),
        change=change,
        options=options_text(request),
        step_s=other.step_s,
        peak_bytes=other.peak_bytes,
        fits=other.fits,
    )


def _changes(
    request: Request, own: Request, best: Evaluation
) -> Iterator[tuple[str, Request]]:
    """Yield each choice that may differ, and a request in which it alone is free."""
    per_rank = request.stages_per_rank
    yield (
        "schedule",
        replace(own, schedules=request.schedules, stages_per_rank=per_rank),
    )
    yield "microbatches", replace(own, microbatches=request.microbatches)
    yield (
        "sharding",
        replace(
            own,
            presets=request.presets,
            meshes=request.meshes,
            strategies=request.strategies,
        ),
    )
    yield (
        "replicas",
        replace(own, replicas=request.replicas, microbatches=request.microbatches),
    )
    if len(request.remat) > 1:
        uses_full = "full" in best.cut.remat
        yield "remat", replace(own, remat=("none",) if uses_full else ("full",))


def _is_same(change: str, other: Setting, mine: Setting) -> bool:
    """Return whether two settings agree in the choice that should differ."""
    return {
        "schedule": mine.schedule == other.schedule,
        "microbatches": mine.num_microbatches == other.num_microbatches,
        "sharding": (mine.strategy, mine.strategies)
        == (other.strategy, other.strategies),
        "replicas": mine.replicas == other.replicas,
        "remat": False,
    }[change]


def _label(change: str, other: Evaluation) -> str:
    setting = other.cut.setting
    return {
        "schedule": setting.schedule,
        "microbatches": f"{setting.num_microbatches} of {setting.rows} rows",
        "sharding": _sharding_text(setting),
        "replicas": f"{setting.replicas} of {setting.num_ranks} ranks, "
        f"{setting.num_microbatches} microbatches",
        "stages": "the planner's",
        "remat": "full everywhere" if "none" not in other.cut.remat else "none",
    }[change]


def _sharding_text(setting: Setting) -> str:
    if setting.strategies:
        return ", ".join(strategy.text for strategy in setting.strategies)
    return " + ".join(setting.strategy.presets) + f" ({setting.strategy})"


def options_text(request: Request) -> str:
    """Write the options of the command for such a plan."""
    parts = [f"--rows {request.rows}"]
    lists: tuple[tuple[str, Sequence[object] | None], ...] = (
        ("replicas", request.replicas),
        ("microbatches", request.microbatches),
        ("schedules", request.schedules),
        ("stages-per-rank", request.stages_per_rank),
        ("sharding", request.presets),
        ("mesh", request.meshes and [f"{d}x{m}" for d, m in request.meshes]),
        ("remat", request.remat),
        ("devices-per-rank", request.counts),
        ("rank-sharding", [strategy.text for strategy in request.strategies]),
    )
    if request.num_ranks is not None:
        parts.append(f"--ranks {request.num_ranks}")
    if request.devices_per_rank is not None:
        parts.append(f"--devices-per-rank {request.devices_per_rank}")
    for name, values in lists:
        if values:
            parts.append(f"--{name} {','.join(map(str, values))}")
    return " ".join(parts)


def reasons_of(
    evaluator: Evaluator, best: Evaluation, alternatives: Sequence[Alternative]
) -> Iterator[str]:
    """Yield comparisons; every number is one that was evaluated."""
    setting = best.cut.setting
    balanced = balanced_seconds(evaluator, setting)
    yield (
        f"split: {best.cut.num_stages} stages take {seconds_text(best.step_s)}; "
        f"perfectly balanced ones are estimated at {seconds_text(balanced)}"
    )
    own = {
        "schedule": setting.schedule,
        "microbatches": f"{setting.num_microbatches} of {setting.rows} rows",
        "sharding": _sharding_text(setting),
        "replicas": f"{setting.replicas} of {setting.num_ranks} ranks",
        "stages": "the given ones",
        "remat": "full in "
        f"{best.cut.remat.count('full')} of {best.cut.num_stages} stages",
    }
    for other in alternatives:
        change = other.step_s / best.step_s - 1 if best.step_s else 0.0
        if other.fits:
            why = (
                f"{seconds_text(other.step_s)} a step, {100 * change:+.1f} %, with "
                f"{bytes_text(other.peak_bytes)} of a device in place of "
                f"{bytes_text(best.peak_bytes)}"
            )
        elif setting.strategies:
            why = f"it does not fit: a device would hold {bytes_text(other.peak_bytes)}"
        else:
            over = other.peak_bytes - best.capacities[0]
            why = f"a device would need {bytes_text(over)} more than it has"
        yield f"{other.change}: {own[other.change]} and not {other.label}: {why}"
