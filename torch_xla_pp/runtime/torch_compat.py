"""The only place that touches private parts of torch.distributed.pipelining 2.9.

And of torch's profiler and parameters.
"""

import contextlib
import dis
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
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
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _PipelineSchedule,
)
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.utils import _pytree as pytree

from torch_xla_pp.graph import Template

__all__ = [
    "SPLIT_MARK",
    "Pipe",
    "ScheduleMulti",
    "StageBase",
    "batch_of_step",
    "begin_microbatches",
    "calling_schedule",
    "compute_loss",
    "drop_outputs",
    "end_microbatches",
    "grad_scale",
    "guard_step",
    "has_backward",
    "is_profiling",
    "local_stages",
    "loss_function",
    "loss_of",
    "merge_outputs_as",
    "merge_outputs_by",
    "merge_spec",
    "move_factories_to",
    "num_microbatches",
    "num_stages",
    "order_in_cells",
    "runs_as",
    "set_loss_function",
    "set_order",
    "take_value",
    "trace_and_split",
    "wants_outputs",
]

StageBase = _PipelineStageBase
Schedule = _PipelineSchedule
ScheduleMulti = PipelineScheduleMulti
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


def batch_of_step(schedule: Schedule) -> list[Any]:
    """Return the leaves of what a schedule is about to cut: arguments and target."""
    frame = _frame_of_step(schedule)
    if frame is None:
        return []
    names = ("args", "kwargs", "target")
    return pytree.tree_leaves([frame.f_locals.get(name) for name in names])


def guard_step(
    schedule: Schedule, guard: Callable[[], contextlib.AbstractContextManager[Any]]
) -> None:
    """Run `step` and `eval` of `schedule` inside of `guard()` from now on.

    So that what is raised outside of a stage's methods, such as by the splitting of a
    batch, is noticed, too. A stage knows its schedule only once the first step has
    begun; of that one the splitting is still to come.
    """
    for name in ("step", "_split_inputs"):
        if name not in vars(schedule):
            setattr(schedule, name, _guarded(getattr(schedule, name), guard))


def _guarded(
    function: Callable[..., Any],
    guard: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with guard():
            return function(*args, **kwargs)

    return guarded


def is_profiling() -> bool:
    """Return whether torch's profiler is on.

    `record_function` takes 20 µs or more also while it is off.
    """
    return torch.autograd.profiler._is_profiler_enabled


def take_value(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Give a parameter the value of another device or dtype; it stays the same object.

    Who holds it, such as an optimizer, needs not be told. Assigning `data` is refused
    between kinds of devices, and `torch.utils.swap_tensors` where there are weak
    references, which tracing leaves. Its `grad` is None afterwards.
    """
    new = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
    torch._C._swap_tensor_impl(parameter, new)


def local_stages(schedule: Schedule) -> list[Any]:
    """Return the stages of this rank that `schedule` drives."""
    stages = getattr(schedule, "_stages", None)
    return list(stages) if stages is not None else [schedule._stage]  # type: ignore[attr-defined]


def num_microbatches(schedule: Schedule) -> int:
    """Return into how many microbatches `schedule` cuts a batch."""
    return schedule._n_microbatches


def num_stages(schedule: Schedule) -> int:
    """Return the number of stages of the pipeline that `schedule` drives."""
    return int(schedule._num_stages)  # type: ignore[attr-defined]


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


def wants_outputs(schedule: Schedule) -> bool:
    """Return whether the running `step` or `eval` is to return the outputs.

    Newer torch has an argument `return_outputs`; torch 2.9 takes it for one of the
    model's, so it is taken out of these. Where it is not given, the outputs are wanted
    unless the statement that called does nothing with them. Call it at the start of a
    step, once. This can go when upstream tells stages.
    """
    frame = _frame_of_step(schedule)
    if frame is None:
        return True
    wanted = frame.f_locals.get("kwargs", {}).pop("return_outputs", None)
    if wanted is not None:
        return bool(wanted)
    caller = _caller(frame)
    if caller is not None and _is_call(caller, schedule, "eval"):
        caller = caller.f_back
    return caller is None or not _is_discarded(caller.f_code, caller.f_lasti)


def _frame_of_step(schedule: Schedule) -> FrameType | None:
    """Return the frame of the running step of a schedule."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_call(frame, schedule, "step"):
        frame = frame.f_back
    return frame


def _caller(frame: FrameType) -> FrameType | None:
    """Return the caller of a frame, past `guard_step`'s."""
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__") == __name__:
        caller = caller.f_back
    return caller


def _is_call(frame: FrameType, schedule: Schedule, method: str) -> bool:
    """Return whether a frame is that of upstream's method of a schedule."""
    code = frame.f_code
    is_upstream = frame.f_globals.get("__name__") == _PipelineSchedule.__module__
    return (
        is_upstream
        and code.co_name == method
        and frame.f_locals.get("self") is schedule
    )


@functools.lru_cache(maxsize=64)
def _is_discarded(code: CodeType, call: int) -> bool:
    """Return whether the value of a call in `code` is dropped where it is returned.

    Args:
        code: The caller's.
        call: Offset of the instruction that calls.
    """
    following = {x.offset: x for x in dis.get_instructions(code) if x.offset > call}
    found = following.get(min(following, default=0))
    while found is not None and found.opname == "JUMP_FORWARD":
        found = following.get(found.argval)
    return found is not None and found.opname == "POP_TOP"


def merge_spec(schedule: Schedule) -> Any:
    """Return how `schedule` merges the outputs of microbatches, None if by default."""
    return schedule._output_merge_spec


def merge_outputs_by(schedule: Schedule, spec: Any) -> None:
    """Let `schedule` merge the outputs of microbatches by a spec of upstream's."""
    schedule._output_merge_spec = spec


def drop_outputs(schedule: Schedule) -> None:
    """Let `schedule` return None for the outputs, of which it gets none."""
    schedule._output_merge_spec = _CustomReducer(None, _append)  # type: ignore[no-untyped-call, assignment]


def merge_outputs_as(
    schedule: Schedule, template: Template, shapes: Sequence[tuple[int, ...]]
) -> None:
    """Let `schedule` concatenate the tensors of outputs and keep what is none.

    Scalars, such as losses, become a vector of one per microbatch. Without being told,
    a schedule concatenates everything, and fails for scalars, numbers and None.

    Args:
        schedule: The schedule.
        template: What the last stage returns.
        shapes: Shape of each of its tensors.
    """
    whole = TensorChunkSpec(0)  # type: ignore[no-untyped-call]
    stacked = _CustomReducer(None, _append)  # type: ignore[no-untyped-call]
    spec = template.fill([whole if shape else stacked for shape in shapes])
    merge_outputs_by(schedule, spec)


def _append(values: torch.Tensor | None, scalar: torch.Tensor) -> torch.Tensor:
    last = scalar.unsqueeze(0)
    return last if values is None else torch.cat([values, last])


def runs_as(schedule: Schedule, upstream: type[Schedule]) -> bool:
    """Return whether the loop of `schedule` over its actions is that of `upstream`."""
    return type(schedule)._step_microbatches is upstream._step_microbatches


def order_in_cells(schedule: ScheduleMulti) -> list[list[str]]:
    """Return the actions of each rank as upstream writes them, idle steps as "".

    They are the lowered ones if `schedule` runs those; nothing if it has no order yet.
    """
    order: dict[int, Any] = getattr(schedule, "pipeline_order_with_comms", {})
    order = order or schedule.pipeline_order
    return [
        ["" if action is None else str(action) for action in order[rank]]
        for rank in sorted(order)
    ]


def set_order(schedule: ScheduleMulti, cells: Sequence[Sequence[str]]) -> None:
    """Give `schedule` its actions, and its stages the ranks that follow from them."""
    schedule.pipeline_order = {
        rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(cells)
    }
    schedule._validate_and_set_stage_mapping(schedule.pipeline_order)


def has_backward(schedule: Schedule) -> bool:
    """Return whether the step that `schedule` runs is a training step."""
    return schedule._has_backward


def begin_microbatches(
    schedule: ScheduleMulti,
    args: list[Any] | None,
    kwargs: list[Any] | None,
    targets: list[Any] | None,
    losses: list[Any] | None,
) -> tuple[list[Any], list[Any]]:
    """Check what a schedule passes to its own loop, and prepare its stages.

    Returns:
        The positional and the keyword arguments of each microbatch.
    """
    every_args, every_kwargs = schedule._check_inputs(args, kwargs, targets, losses)
    if not schedule._stages_initialized:
        schedule._initialize_stages(every_args[0], every_kwargs[0])
    return every_args, every_kwargs


def compute_loss(
    schedule: Schedule, stage: Any, output: Any, targets: list[Any] | None, index: int
) -> None:
    """Compute and keep the loss of a microbatch, if `stage` is the last one."""
    schedule._maybe_compute_loss(stage, output, targets, index)  # type: ignore[no-untyped-call]


def loss_of(schedule: Schedule, stage: Any, index: int) -> Any:
    """Return the loss of a microbatch that `compute_loss` kept, None if there is none.

    Upstream raises for other stages when the last one is on the same rank and has not
    come to this microbatch.
    """
    if not stage.is_last:
        return None
    return schedule._maybe_get_loss(stage, index)  # type: ignore[no-untyped-call]


def end_microbatches(schedule: ScheduleMulti, losses: list[Any] | None) -> None:
    """Hand the losses of a step over to the caller's list."""
    schedule._update_losses(schedule._stages, losses)  # type: ignore[no-untyped-call]


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
