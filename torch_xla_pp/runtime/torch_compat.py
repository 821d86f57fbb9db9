"""The only place that touches private parts of torch.distributed.pipelining 2.9."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.distributed.pipelining import Pipe
from torch.distributed.pipelining import pipeline as _upstream_pipeline
from torch.distributed.pipelining._IR import _modify_graph_op_device
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.pipelining.stage import _PipelineStageBase

from torch_xla_pp.graph import Template

__all__ = [
    "Pipe",
    "StageBase",
    "calling_schedule",
    "grad_scale",
    "has_merge_spec",
    "local_stages",
    "loss_function",
    "merge_outputs_as",
    "move_factories_to",
    "num_microbatches",
    "set_loss_function",
    "trace_and_split",
]

StageBase = _PipelineStageBase
Schedule = _PipelineSchedule


def calling_schedule() -> Schedule | None:
    """Return the schedule whose method called the caller, directly or not.

    A stage is not told which schedule drives it, but must know two facts in time:
    whether gradients are to be divided by the number of microbatches (the call of
    `scale_grads` comes too late, is made in `eval` too, and is missing after a
    backward-weight action of `_PipelineScheduleRuntime`), and which other stages
    the schedule drives. This can go when upstream passes them.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, _PipelineSchedule):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def local_stages(schedule: Schedule) -> list[Any]:
    """Return the stages of this rank that `schedule` drives."""
    stages = getattr(schedule, "_stages", None)
    return list(stages) if stages is not None else [schedule._stage]  # type: ignore[attr-defined]


def num_microbatches(schedule: Schedule) -> int:
    """Return into how many microbatches `schedule` cuts a batch."""
    return schedule._n_microbatches


def grad_scale(schedule: Schedule) -> float:
    """Return what the gradient of each microbatch is to be multiplied by."""
    return 1.0 / num_microbatches(schedule) if schedule.scale_grads else 1.0


def loss_function(schedule: Schedule) -> Callable[[Any, Any], Any] | None:
    """Return what computes the loss of a microbatch from output and target."""
    return schedule._loss_fn


def set_loss_function(schedule: Schedule, function: Callable[[Any, Any], Any]) -> None:
    """Let `schedule` call `function` for the loss.

    A schedule computes the loss between two calls of the last stage, which is told
    only of the result. This can go when upstream passes the target to the stage.
    """
    schedule._loss_fn = function


def has_merge_spec(schedule: Schedule) -> bool:
    """Return whether `schedule` was told how to merge the outputs of microbatches."""
    return schedule._output_merge_spec is not None


def merge_outputs_as(schedule: Schedule, template: Template) -> None:
    """Let `schedule` concatenate the tensors of outputs and keep what is none.

    Without being told, it concatenates everything, and fails for numbers and None.
    """
    whole = TensorChunkSpec(0)  # type: ignore[no-untyped-call]
    spec = template.fill([whole] * template.num_slots)
    schedule._output_merge_spec = spec


def trace_and_split(*args: Any, **kwargs: Any) -> Pipe:
    """Call upstream's `pipeline`, without its warnings on its own internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _upstream_pipeline(*args, **kwargs)


def move_factories_to(module: torch.nn.Module, device: torch.device) -> None:
    """Let a traced module create its constants on `device`.

    The trace has the device of the traced model built in.
    """
    if isinstance(module, fx.GraphModule):
        _modify_graph_op_device(module, device)
