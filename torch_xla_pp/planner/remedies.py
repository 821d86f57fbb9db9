"""What to say when nothing fits: what is missing, and what would help."""

from collections.abc import Iterator
from dataclasses import replace

from torch_xla_pp.planner.evaluation import Evaluation, Evaluator
from torch_xla_pp.planner.search import SearchResult, best_of, search
from torch_xla_pp.planner.settings import Request
from torch_xla_pp.planner.strategies import PRESETS
from torch_xla_pp.text import bytes_text, seconds_text


def nothing_fits(request: Request, evaluator: Evaluator, result: SearchResult) -> str:
    """Say what the nearest plan lacks, and what would help, in order."""
    lines = []
    if result.best:
        lines.append(_least_text(best_of(result)))
    else:
        capacity = evaluator.cluster.capacity_bytes
        lines.append(
            f"plan: expected stages that fit {bytes_text(capacity)} of a device, got "
            f"none from planner {request.planner}."
        )
    for label, asked, other in _remedies(request, evaluator):
        try:
            found = search(asked, other)
        except ValueError:
            continue
        if found.best:
            best = best_of(found)
            effect = (
                f"fits with {bytes_text(best.peak_bytes)}, {seconds_text(best.step_s)} "
                "a step"
                if best.fits
                else f"still needs {bytes_text(best.peak_bytes)}"
            )
            lines.append(f"  {label}: {effect}")
    return "\n".join(lines)


def _least_text(best: Evaluation) -> str:
    number = max(range(len(best.ranks)), key=lambda rank: best.ranks[rank].total)
    held, setting = best.ranks[number], best.cut.setting
    saved = bytes_text(held.saved + held.passed)
    return (
        f"plan: expected a plan that fits {bytes_text(best.capacity_bytes)} of a "
        f"device, got at least {bytes_text(held.total)} on rank {number} "
        f"({bytes_text(held.state)} state, {saved} saved, "
        f"{bytes_text(held.outputs)} outputs, {bytes_text(held.temporary)} temporary), "
        f"with {setting.num_ranks} ranks, {setting.strategy}, "
        f"{setting.num_microbatches} microbatches of {setting.rows} rows, "
        f"{setting.schedule}. Of these, in order, change what helps:"
    )


def _remedies(
    request: Request, evaluator: Evaluator
) -> Iterator[tuple[str, Request, Evaluator]]:
    if "full" not in request.remat:
        yield "allow remat full", replace(request, remat=("none", "full")), evaluator
    cluster = evaluator.cluster
    more = replace(
        request, num_ranks=None if not request.num_ranks else 2 * request.num_ranks
    )
    doubled = replace(cluster, num_devices=2 * cluster.num_devices)
    yield (
        "twice the ranks",
        replace(more, replicas=None),
        replace(evaluator, cluster=doubled),
    )
    if set(request.presets) != set(PRESETS):
        yield "allow dp, fsdp and tp", replace(request, presets=PRESETS), evaluator
    if request.rows % 2 == 0:
        fewer = replace(request, rows=request.rows // 2, microbatches=None)
        yield f"{request.rows // 2} rows a step", fewer, evaluator
