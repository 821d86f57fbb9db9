"""The faults of a plan by itself, whatever the model.

A file may have the form of a plan that could never run.
"""

import math
from collections import Counter
from collections.abc import Iterator

from torch_xla_pp.planner.orders import LISTED, SCHEDULES
from torch_xla_pp.planner.report import ReportedPlan


def plan_faults(plan: ReportedPlan) -> Iterator[str]:
    """Yield the faults of a plan that it has for any model."""
    yield from _row_faults(plan)
    yield from _rank_faults(plan)
    yield from _stage_faults(plan)
    yield from _edge_faults(plan)


def _row_faults(plan: ReportedPlan) -> Iterator[str]:
    batch = plan.batch
    product = batch.replicas * batch.microbatches * batch.rows_per_microbatch
    if product != batch.rows:
        yield (
            f"rows: expected {batch.rows} to be {batch.replicas} replicas x "
            f"{batch.microbatches} microbatches x {batch.rows_per_microbatch} rows, "
            f"got {product}. Correct one."
        )
    for number, rank in enumerate(plan.ranks):
        if math.prod(rank.mesh.values()) != rank.devices:
            yield (
                f"rank {number}: expected a mesh of its {rank.devices} devices, got "
                f"{dict(rank.mesh)}. Correct the mesh."
            )
        split = rank.mesh.get(rank.batch_axis or "", 1)
        if batch.rows_per_microbatch % split:
            yield (
                f"rank {number}: expected rows of a microbatch that {split} devices "
                f"divide, got {batch.rows_per_microbatch}. Change microbatches."
            )


def _rank_faults(plan: ReportedPlan) -> Iterator[str]:
    """Find ranks without stages, stages without ranks, and missing predictions."""
    num_ranks = len(plan.ranks)
    placed = {stage.rank for stage in plan.stages}
    if placed != set(range(num_ranks)):
        yield (
            f"ranks: expected a stage on each of ranks 0..{num_ranks - 1}, got stages "
            f"on {', '.join(map(str, sorted(placed)))}. Place every stage on a rank "
            "that there is, and a stage on every rank."
        )
    for what, expected, got in (
        ("ranks", num_ranks, len(plan.predicted.ranks)),
        ("stages", len(plan.stages), len(plan.predicted.stages)),
    ):
        if expected != got:
            yield (
                f"{what}: expected a prediction for each of {expected}, got {got}. "
                "Plan again."
            )
    if plan.schedule.name not in SCHEDULES:
        yield (
            f"schedule: expected one of {', '.join(SCHEDULES)}, got "
            f"{plan.schedule.name!r}. Name one."
        )
    if (plan.schedule.name == LISTED) != (plan.schedule.csv is not None):
        yield (
            f"schedule: expected a table of actions for {LISTED} alone, got "
            f"{'none' if plan.schedule.csv is None else 'one'} for "
            f"{plan.schedule.name}. Plan again."
        )


def _stage_faults(plan: ReportedPlan) -> Iterator[str]:
    """Find operations in several stages or none, and unknown ways of remat."""
    counts = Counter(op for stage in plan.stages for op in stage.ops)
    for op, count in counts.items():
        if count > 1:
            yield f"operation {op}: expected in one stage, got it in {count}. Keep one."
    if len(counts) != plan.model.num_ops:
        yield (
            f"operations: expected the {plan.model.num_ops} of the model in stages, "
            f"got {len(counts)}. Put each in one stage."
        )
    for number, stage in enumerate(plan.stages):
        if stage.remat not in ("none", "full"):
            yield (
                f"stage {number}: expected remat none or full, got {stage.remat!r}. "
                "Correct it."
            )


def _edge_faults(plan: ReportedPlan) -> Iterator[str]:
    """Find values that go to no stage, or to a lower one."""
    stages = range(len(plan.stages))
    edges = sorted({edge for flow in plan.predicted.flows for edge in flow.edges})
    for producer, consumer in edges:
        if producer not in stages or consumer not in stages:
            yield (
                f"edges: expected stages 0..{len(stages) - 1}, got "
                f"{producer}->{consumer}. Correct it."
            )
        elif producer >= consumer:
            yield (
                f"stages: expected values to go to higher stages, got them from "
                f"{producer} to {consumer}. Number stages by data flow; stages that "
                "use each other in a circle cannot run."
            )
