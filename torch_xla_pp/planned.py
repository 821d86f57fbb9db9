"""From a plan to stages, shardings and schedules that run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.utils import _pytree as pytree

from torch_xla_pp.errors import PlanError
from torch_xla_pp.graph import GivenStages
from torch_xla_pp.mesh import AxisRules, axis_of, presets
from torch_xla_pp.planner import ParameterRules, PipelinePlan
from torch_xla_pp.runtime import PipelineStage, ScheduleFromTable

# Orders of actions for which torch has a class.
_SINGLE: Mapping[str, Callable[..., Any]] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
}
_MULTI: Mapping[str, Callable[..., Any]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}
_PRESETS: Mapping[str, Callable[[], AxisRules]] = {
    "dp": presets.dp,
    "fsdp": presets.fsdp,
    "tp": presets.tp,
}
# These split nothing without the model's patterns.
_OF_PARAMETERS = ("fsdp", "tp")


def given_stages(plan: PipelinePlan) -> GivenStages:
    """Return the stages of a plan by the names of their operations."""
    names = tuple(f"stage_{index}" for index in range(len(plan.stages)))
    return GivenStages(names=names, stages=plan.stage_of, digests=plan.model.op_digests)


def check_example(plan: PipelinePlan, example: Any) -> None:
    """Refuse an example that differs from the planned microbatch.

    Raises:
        ValueError: Its first tensor has another number of rows.
    """
    leaves = pytree.tree_leaves(example)
    shapes = [tuple(x.shape) for x in leaves if isinstance(x, Tensor) and x.dim()]
    rows = plan.batch.rows_per_microbatch
    if shapes and shapes[0][0] != rows:
        raise ValueError(
            f"pipeline: the plan has microbatches of {rows} rows: expected an example "
            f"of as many, got one of shape {list(shapes[0])}. Pass plan.example(args), "
            "or plan for others."
        )


def check_parameters(plan: PipelinePlan, num_bytes: int) -> None:
    """Refuse a model of another size than was planned.

    Raises:
        PlanError: Its parameters have another size.
    """
    expected = plan.model.parameter_bytes
    if num_bytes != expected:
        raise PlanError(
            f"pipeline: the plan is of another model: expected {expected} bytes of "
            f"parameters, got {num_bytes}. Pass the model that was planned, or plan "
            "this one."
        )


def planned_rules(plan: PipelinePlan, rank: int, rules: AxisRules | None) -> AxisRules:
    """Return the axis rules of a rank's stages.

    Args:
        plan: The plan.
        rank: The rank in its pipeline.
        rules: The model's patterns, where the plan has none, or others.

    Raises:
        ValueError: The plan splits parameters, and there is no pattern for them.
    """
    names = plan.ranks[rank].rules
    if plan.rules is not None:
        rules = _axis_rules(plan.rules) | (rules or AxisRules())
    split = [name for name in names if name in _OF_PARAMETERS]
    if split and (rules is None or not rules.parameters):
        raise ValueError(
            f"build_stages: rank {rank} of the plan splits parameters by "
            f"{' and '.join(split)}: expected AxisRules with patterns that name their "
            "axes, got none. Pass sharding=AxisRules(parameters={...}), plan with "
            "rules=, or with sharding=('dp',)."
        )
    return presets.mix(*(_PRESETS[name]() for name in names)) | (rules or AxisRules())


def _axis_rules(rules: ParameterRules) -> AxisRules:
    """Return the rules that a plan was made with."""
    return AxisRules(
        axes={name: axis_of(axes) for name, axes in rules.axes.items()},
        parameter_axes={n: axis_of(axes) for n, axes in rules.parameter_axes.items()},
        parameters=rules.parameters,
    )


def planned_schedule(
    plan: PipelinePlan,
    stages: Sequence[PipelineStage],
    loss_fn: Callable[..., Any] | None,
    **options: Any,
) -> Any:
    """Return the schedule of a plan: torch's class, or a table where it has none.

    Args:
        plan: The plan.
        stages: This rank's stages.
        loss_fn: As for torch's schedules.
        **options: Likewise.
    """
    name, count = plan.schedule.name, plan.batch.microbatches
    if name in _SINGLE:
        return _SINGLE[name](stages[0], count, loss_fn=loss_fn, **options)
    if name in _MULTI:
        return _MULTI[name](list(stages), count, loss_fn=loss_fn, **options)
    return ScheduleFromTable(list(stages), plan.table(), loss_fn, **options)
