"""The only place that touches private parts of torch.distributed.pipelining 2.9."""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.distributed.pipelining import Pipe, SplitPoint
from torch.distributed.pipelining._IR import (
    MultiUseParameterConfig,
    _modify_graph_op_device,
    annotate_split_points,
    aten_pipe_split_alias,
)
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.pipelining.stage import _PipelineStageBase

__all__ = [
    "SPLIT_MARK",
    "Pipe",
    "StageBase",
    "calling_schedule",
    "local_stages",
    "loss_function",
    "move_factories_to",
    "num_microbatches",
    "scales_grads",
    "set_loss_function",
    "trace_and_split",
]

StageBase = _PipelineStageBase
Schedule = _PipelineSchedule
SPLIT_MARK = aten_pipe_split_alias


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


def scales_grads(schedule: Schedule) -> bool:
    """Return whether gradients are averaged over the microbatches."""
    return schedule.scale_grads


def loss_function(schedule: Schedule) -> Callable[[Any, Any], Any] | None:
    """Return what computes the loss of a microbatch from output and target."""
    return schedule._loss_fn


def set_loss_function(schedule: Schedule, function: Callable[[Any, Any], Any]) -> None:
    """Let `schedule` call `function` for the loss.

    A schedule computes the loss between two calls of the last stage, which is told
    only of the result. This can go when upstream passes the target to the stage.
    """
    schedule._loss_fn = function


def trace_and_split(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    split_spec: dict[str, SplitPoint],
    policy: Callable[[fx.GraphModule], fx.GraphModule],
) -> Pipe:
    """Trace a model with upstream's tracer and cut it where `policy` puts marks.

    As upstream's `pipeline`, but it takes both split points and a policy, undoes its
    changes to `module`, and finds each parameter under the one name that the trace
    has for it: among several names of a parameter upstream takes one by the order of
    a set, which may be one that the stage lacks. Warnings of upstream on its own
    internals are left out.
    """
    with warnings.catch_warnings(), _annotated(module, split_spec):
        warnings.simplefilter("ignore")
        program = Pipe._trace_with_export(module, args, kwargs)
        pipe: Pipe = Pipe._from_traced(
            program.module(check_guards=False),
            program,
            MultiUseParameterConfig.REPLICATE,
            split_policy=policy,
        )
        return pipe


@contextlib.contextmanager
def _annotated(
    module: torch.nn.Module, split_spec: dict[str, SplitPoint]
) -> Iterator[None]:
    """Let the submodules at split points leave marks when they are traced."""
    submodules = [module.get_submodule(name) for name in split_spec]
    before = [(sub, sub.__dict__.get("forward")) for sub in submodules]
    annotate_split_points(module, split_spec)
    try:
        yield
    finally:
        for submodule, forward in before:
            for name in ("forward", "_orig_forward"):
                submodule.__dict__.pop(name, None)
            if forward is not None:
                submodule.forward = forward


def move_factories_to(module: torch.nn.Module, device: torch.device) -> None:
    """Let a traced module create its constants on `device`.

    The trace has the device of the traced model built in.
    """
    if isinstance(module, fx.GraphModule):
        _modify_graph_op_device(module, device)
