"""The text of a plan that the command prints."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Protocol

from torch_xla_pp.advice import PipelineLoad, advise
from torch_xla_pp.planner.evaluation import RankBytes
from torch_xla_pp.planner.plan_values import (
    Alternative,
    Candidate,
    CostSource,
    PlannedBatch,
    PlannedModel,
    PlannedRank,
    PlannedSchedule,
    PlannedStage,
    Prediction,
)
from torch_xla_pp.text import bytes_text, seconds_text, table


class ReportedPlan(Protocol):
    """The facts of a `PipelinePlan` in a report, with the same names."""

    @property
    def model(self) -> PlannedModel: ...  # noqa: D102
    @property
    def batch(self) -> PlannedBatch: ...  # noqa: D102
    @property
    def stages(self) -> tuple[PlannedStage, ...]: ...  # noqa: D102
    @property
    def ranks(self) -> tuple[PlannedRank, ...]: ...  # noqa: D102
    @property
    def schedule(self) -> PlannedSchedule: ...  # noqa: D102
    @property
    def predicted(self) -> Prediction: ...  # noqa: D102
    @property
    def costs(self) -> CostSource: ...  # noqa: D102
    @property
    def reasons(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def alternatives(self) -> tuple[Alternative, ...]: ...  # noqa: D102
    @property
    def baselines(self) -> Mapping[str, float]: ...  # noqa: D102
    @property
    def candidates(self) -> tuple[Candidate, ...]: ...  # noqa: D102
    @property
    def device_load(self) -> PipelineLoad | None: ...  # noqa: D102
    @property
    def stage_of(self) -> Mapping[str, int]: ...  # noqa: D102


def report_of(plan: ReportedPlan) -> str:
    """Return a plan's step, its stages, its reasons, and alternatives."""
    lines = [headline_of(plan), "", *_stage_lines(plan), "", *_rank_lines(plan), ""]
    lines += [f"why    {reason}" for reason in plan.reasons]
    if plan.device_load is not None:
        faults = advise(plan.device_load).faults()
        lines += [f"{'advice' if text[0] != ' ' else '':6} {text}" for text in faults]
    if plan.alternatives:
        lines += ["", *_alternative_lines(plan)]
    if plan.baselines:
        texts = (f"{n} {seconds_text(s)}" for n, s in sorted(plan.baselines.items()))
        lines += ["", f"other planners: {', '.join(texts)}"]
    lines += [f"warning: {text}" for text in plan.costs.warnings]
    return "\n".join(lines)


def headline_of(plan: ReportedPlan) -> str:
    """Return one line of a plan's choices."""
    predicted, batch, rank = plan.predicted, plan.batch, plan.ranks[0]
    replicas = f", {batch.replicas} replicas" if batch.replicas > 1 else ""
    ranks = f"{len(plan.ranks)} ranks x {rank.devices} {rank.device}"
    if any(_devices_text(other) != _devices_text(rank) for other in plan.ranks):
        ranks = f"{len(plan.ranks)} ranks of {_runs_text(plan.ranks)}"
    return (
        f"step {seconds_text(predicted.step_s)} ({predicted.rows_per_s:,.0f} rows/s), "
        f"{ranks}{replicas}, "
        f"{batch.microbatches} microbatches of {batch.rows_per_microbatch} rows, "
        f"{plan.schedule.name}, bubble {100 * predicted.bubble:.1f} %, costs: "
        f"{plan.costs.source}"
    )


def _devices_text(rank: PlannedRank) -> str:
    return f"{rank.devices} {rank.device}"


def _runs_text(ranks: Sequence[PlannedRank]) -> str:
    """Name the devices of ranks in order, those of equal neighbours once."""
    parts = []
    for text, group in groupby(map(_devices_text, ranks)):
        count = len([*group])
        parts.append(f"{count} x {text}" if count > 1 else text)
    return ", ".join(parts)


def differences(plan: ReportedPlan, other: ReportedPlan) -> str:
    """Describe the different choices of two plans, and their effects."""
    mine, theirs = _facts(plan), _facts(other)
    rows = [
        [name, mine[name], theirs[name]]
        for name in mine
        if mine[name] != theirs.get(name)
    ]
    moved = [op for op, stage in plan.stage_of.items() if op in other.stage_of]
    moved = [op for op in moved if plan.stage_of[op] != other.stage_of[op]]
    lines = table(["differs", "this", "against"], rows) if rows else ["no difference"]
    if moved:
        more = ", ..." if len(moved) > 5 else ""
        lines.append(
            f"{len(moved)} operations in another stage: {', '.join(moved[:5])}{more}"
        )
    return "\n".join(lines)


def _facts(plan: ReportedPlan) -> dict[str, str]:
    batch, predicted = plan.batch, plan.predicted
    return {
        "model": plan.model.digest,
        "step": seconds_text(predicted.step_s),
        "bubble": f"{100 * predicted.bubble:.1f} %",
        "memory": bytes_text(max(rank.bytes.total for rank in predicted.ranks)),
        "ranks": str(len(plan.ranks)),
        "stages": str(len(plan.stages)),
        "depth": str(predicted.depth),
        "rows": str(batch.rows),
        "replicas": str(batch.replicas),
        "microbatches": f"{batch.microbatches} of {batch.rows_per_microbatch}",
        "schedule": plan.schedule.name,
        "mesh": _mesh_text(plan),
        "remat": ",".join(stage.remat for stage in plan.stages),
        "device": " ".join(dict.fromkeys(rank.device for rank in plan.ranks)),
        "memory allowed": " ".join(
            dict.fromkeys(bytes_text(rank.capacity_bytes) for rank in plan.ranks)
        ),
        "optimizer": f"{plan.costs.optimizer_bytes:g} bytes a byte of parameters",
        "costs": plan.costs.source,
    }


def _mesh_text(plan: ReportedPlan) -> str:
    """Name the meshes of ranks, one for all if they are equal."""
    texts = [_mesh_of_rank(rank) for rank in plan.ranks]
    return texts[0] if len({*texts}) == 1 else ", ".join(texts)


def _mesh_of_rank(rank: PlannedRank) -> str:
    sizes = " x ".join(f"{axis} {size}" for axis, size in sorted(rank.mesh.items()))
    return f"{sizes} ({' + '.join(rank.rules)})" if sizes else "1 device"


def _stage_lines(plan: ReportedPlan) -> list[str]:
    rows = [
        [
            str(number),
            str(stage.rank),
            str(len(stage.ops)),
            stage.remat,
            *(f"{1e3 * s:.4g}" for s in (cost.forward_s, cost.input_s, cost.weight_s)),
            modules_text(stage.modules),
        ]
        for number, (stage, cost) in enumerate(
            zip(plan.stages, plan.predicted.stages, strict=True)
        )
    ]
    header = ["stage", "rank", "ops", "remat", "F ms", "I ms", "W ms", "modules"]
    return table(header, rows)


def _rank_lines(plan: ReportedPlan) -> list[str]:
    step_s = plan.predicted.step_s
    header, rows = ["rank", "busy", "live"], []
    for number, rank in enumerate(plan.predicted.ranks):
        share = f"{100 * rank.busy_s / step_s:.1f} %" if step_s else "-"
        rows.append([str(number), share, str(rank.live)])
    lines = [f"mesh of a rank: {_mesh_text(plan)}"]
    if len({(_devices_text(rank), _mesh_of_rank(rank)) for rank in plan.ranks}) > 1:
        lines, header = [], [*header, "devices", "mesh"]
        for row, planned in zip(rows, plan.ranks, strict=True):
            row += [_devices_text(planned), _mesh_of_rank(planned)]
    held = memory_table(
        [rank.bytes for rank in plan.predicted.ranks],
        [rank.capacity_bytes for rank in plan.ranks],
    )
    return [*lines, *table(header, rows), "", "memory of a device", *held]


def memory_table(ranks: Sequence[RankBytes], capacities: Sequence[int]) -> list[str]:
    """Return lines with the memory of a device of each rank, part by part.

    Args:
        ranks: The bytes of each rank.
        capacities: The memory for them.
    """
    names = [field.name for field in fields(RankBytes)]
    rows = [
        [
            str(number),
            *(bytes_text(getattr(held, name)) for name in names),
            bytes_text(held.total),
            bytes_text(capacity),
        ]
        for number, (held, capacity) in enumerate(zip(ranks, capacities, strict=True))
    ]
    return table(["rank", *names, "total", "of"], rows)


def _alternative_lines(plan: ReportedPlan) -> list[str]:
    rows = [
        [
            other.label,
            other.change,
            seconds_text(other.step_s),
            bytes_text(other.peak_bytes),
            "yes" if other.fits else "no",
        ]
        for other in plan.alternatives
    ]
    return table(["other", "change", "step", "memory", "fits"], rows)


def candidates_text(plan: ReportedPlan, count: int) -> str:
    """Return the best candidates as a table, the fastest of those that fit first.

    Args:
        plan: The plan.
        count: The most that are listed.
    """
    rows = [
        [
            one.label,
            seconds_text(one.step_s),
            bytes_text(one.peak_bytes),
            "yes" if one.fits else "no",
        ]
        for one in plan.candidates[:count]
    ]
    return "\n".join(
        [
            f"{len(rows)} of {len(plan.candidates)} candidates",
            *table(["candidate", "step", "memory", "fits"], rows),
        ]
    )


def modules_text(modules: Sequence[str]) -> str:
    """Write paths of modules, runs of numbered ones as layers.0..5."""
    parts = []
    for head, group in groupby(modules, _before):
        numbers = [_number(path) for path in group]
        if head is None:
            parts += [path for path in numbers if path]
        elif len(numbers) == 1 or numbers[0] == numbers[-1]:
            parts.append(f"{head}.{numbers[0]}")
        else:
            parts.append(f"{head}.{numbers[0]}..{numbers[-1]}")
    found = ", ".join(dict.fromkeys(parts))
    return found if len(found) <= 60 else f"{found[:57]}..."


def _before(path: str) -> str | None:
    """Return what is before the first number of a path, None if it has none."""
    before = [*_before_number(path.split("."))]
    return ".".join(before) if len(before) < path.count(".") + 1 else None


def _number(path: str) -> str:
    words = path.split(".")
    before = [*_before_number(words)]
    return words[len(before)] if len(before) < len(words) else path


def _before_number(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word.isdigit():
            return
        yield word
