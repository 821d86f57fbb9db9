"""The only place that touches private parts of torch's pipeline schedules and stages.

They are those of torch 2.9. It also touches private parts of torch's parameters.
"""

import contextlib
import dis
import functools
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _PipelineSchedule,
)
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.utils import _pytree as pytree

from torch_xla_pp.graph import Template
from torch_xla_pp.schedule import Schedule, gpipe, one_f_one_b

TorchSchedule = _PipelineSchedule
ScheduleMulti = PipelineScheduleMulti
_RANK = "_torch_xla_pp_rank"
_RETURN_OUTPUTS = "return_outputs"


class StepCall(NamedTuple):
    """A call of a schedule's `step` or `eval`.

    Attributes:
        schedule: The schedule.
        batch: The leaves of the batch before it is cut: arguments and target.
        wants_outputs: Whether it is to return the outputs.
    """

    schedule: TorchSchedule
    batch: list[Any]
    wants_outputs: bool


def calling_step() -> StepCall | None:
    """Return the call of a schedule that the caller is part of, None if there is none.

    This is the only function that looks at the call stack. Upstream does not pass to a
    stage which schedule drives it, what the batch is, or whether the outputs are
    wanted, but the stage needs to know in time: whether gradients are to be divided by
    the number of microbatches (the call of `scale_grads` comes too late, is made in
    `eval` too, and is missing after a backward-weight action of
    `_PipelineScheduleRuntime`), which other stages the schedule drives, and what to
    keep. Schedules of this package pass it themselves. This can go when upstream passes
    a context to stages.

    Newer torch has an argument `return_outputs`; torch 2.9 takes it for one of the
    model's, so it is removed from these. If it is not given, the outputs are wanted
    unless the calling statement discards them.
    """
    schedule: TorchSchedule | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if schedule is None and isinstance(owner, _PipelineSchedule):
            schedule = owner
        if schedule is not None and _is_call(frame, schedule, "step"):
            return _call_in(frame, schedule)
        frame = frame.f_back
    return None if schedule is None else StepCall(schedule, [], True)


def _call_in(frame: FrameType, schedule: TorchSchedule) -> StepCall:
    """Return the call of `step` of an upstream frame."""
    names = ("args", "kwargs", "target")
    batch = pytree.tree_leaves([frame.f_locals.get(name) for name in names])
    given = frame.f_locals.get("kwargs", {}).pop(_RETURN_OUTPUTS, None)
    if given is not None:
        return StepCall(schedule, batch, bool(given))
    caller = _caller(frame)
    if caller is not None and _is_call(caller, schedule, "eval"):
        caller = caller.f_back
    is_dropped = caller is not None and _is_discarded(caller.f_code, caller.f_lasti)
    return StepCall(schedule, batch, not is_dropped)


def rank_of(schedule: TorchSchedule, make: Callable[[TorchSchedule], Any]) -> Any:
    """Return this package's object of a schedule, made by `make` at the first call."""
    found = vars(schedule).get(_RANK)
    if found is None:
        found = make(schedule)
        setattr(schedule, _RANK, found)
    return found


def guard_step(
    schedule: TorchSchedule,
    guard: Callable[[], contextlib.AbstractContextManager[Any]],
    end_step: Callable[[], None],
) -> None:
    """Run `step` and `eval` of `schedule` inside `guard()` from now on.

    So errors outside of a stage's methods, such as in the splitting of a batch, are
    noticed, too. A stage knows its schedule only once the first step has begun: in that
    step the guard covers the splitting and the running of microbatches, after which
    `end_step` is called.
    """

    def run_and_end(*args: Any, **kwargs: Any) -> Any:
        # Leftovers of a failed step; torch drops them only at the end of a step.
        schedule._internal_losses.clear()
        result = schedule_runs(*args, **kwargs)
        end_step()
        return result

    if "_step_microbatches" in vars(schedule):
        return
    schedule_runs = schedule._step_microbatches
    setattr(schedule, "_step_microbatches", run_and_end)  # noqa: B010
    for name in ("step", "_split_inputs", "_step_microbatches"):
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


def take_value(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Give a parameter the value of another device or dtype; it stays the same object.

    Objects that hold it, such as an optimizer, keep working. Assigning `data` is
    refused between kinds of devices, and `torch.utils.swap_tensors` where there are
    weak references, which tracing leaves. Its `grad` is None afterwards.
    """
    new = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
    torch._C._swap_tensor_impl(parameter, new)


def local_stages(schedule: TorchSchedule) -> list[Any]:
    """Return the stages of this rank that `schedule` drives."""
    stages = getattr(schedule, "_stages", None)
    return list(stages) if stages is not None else [schedule._stage]  # type: ignore[attr-defined]


def num_microbatches(schedule: TorchSchedule) -> int:
    """Return the number of microbatches into which `schedule` cuts a batch."""
    return schedule._n_microbatches


def cuts_rows(schedule: TorchSchedule) -> bool:
    """Return whether `schedule` cuts every tensor of a batch along dimension 0."""
    return schedule._args_chunk_spec is None and schedule._kwargs_chunk_spec is None


def num_stages(schedule: TorchSchedule) -> int:
    """Return the number of stages of the pipeline that `schedule` drives."""
    return int(schedule._num_stages)  # type: ignore[attr-defined]


def grad_scale(schedule: TorchSchedule) -> float:
    """Return the factor of the gradient of each microbatch."""
    return 1.0 / num_microbatches(schedule) if schedule.scale_grads else 1.0


def loss_function(schedule: TorchSchedule) -> Callable[[Any, Any], Any] | None:
    """Return the function of a microbatch's loss, of output and target."""
    return schedule._loss_fn


def set_loss_function(
    schedule: TorchSchedule, function: Callable[[Any, Any], Any]
) -> None:
    """Let `schedule` call `function` for the loss.

    A schedule computes the loss between two calls of the last stage, and passes only
    the result to it. This can go when upstream passes the target to the stage.
    """
    schedule._loss_fn = function


def _caller(frame: FrameType) -> FrameType | None:
    """Return the caller of a frame, past `guard_step`'s."""
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__") == __name__:
        caller = caller.f_back
    return caller


def _is_call(frame: FrameType, schedule: TorchSchedule, method: str) -> bool:
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


def merge_spec(schedule: TorchSchedule) -> Any:
    """Return how `schedule` merges the outputs of microbatches, None if by default."""
    return schedule._output_merge_spec


def merge_outputs_by(schedule: TorchSchedule, spec: Any) -> None:
    """Let `schedule` merge the outputs of microbatches by a spec of upstream's."""
    schedule._output_merge_spec = spec


def drop_outputs(schedule: TorchSchedule) -> None:
    """Let `schedule` return None for the outputs, as it gets none."""
    schedule._output_merge_spec = _CustomReducer(None, _append)  # type: ignore[no-untyped-call, assignment]


def merge_outputs_as(
    schedule: TorchSchedule, template: Template, shapes: Sequence[tuple[int, ...]]
) -> None:
    """Let `schedule` concatenate the tensors of outputs and keep all other values.

    Scalars, such as losses, become a vector of one per microbatch. By default a
    schedule concatenates everything, and fails for scalars, numbers and None.

    Args:
        schedule: The schedule.
        template: Template of the last stage's output.
        shapes: Shape of each of its tensors.
    """
    whole = TensorChunkSpec(0)  # type: ignore[no-untyped-call]
    stacked = _CustomReducer(None, _append)  # type: ignore[no-untyped-call]
    spec = template.fill([whole if shape else stacked for shape in shapes])
    merge_outputs_by(schedule, spec)


def _append(values: torch.Tensor | None, scalar: torch.Tensor) -> torch.Tensor:
    last = scalar.unsqueeze(0)
    return last if values is None else torch.cat([values, last])


def runs_as(schedule: TorchSchedule, upstream: type[TorchSchedule]) -> bool:
    """Return whether the loop of `schedule` over its actions is that of `upstream`."""
    return type(schedule)._step_microbatches is upstream._step_microbatches


def order_in_cells(schedule: ScheduleMulti) -> list[list[str]]:
    """Return the actions of each rank as upstream writes them, idle steps as "".

    They are lowered if `schedule` runs lowered actions; empty if it has no order yet.
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


def has_backward(schedule: TorchSchedule) -> bool:
    """Return whether the step that `schedule` runs is a training step."""
    return schedule._has_backward


def split_batch(
    schedule: TorchSchedule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    """Cut the arguments of a batch as `schedule` does, per microbatch."""
    cut: tuple[list[Any], list[Any]] = schedule._split_inputs(args, kwargs)
    return cut


def begin_microbatches(
    schedule: ScheduleMulti,
    args: list[Any] | None,
    kwargs: list[Any] | None,
    targets: list[Any] | None,
    losses: list[Any] | None,
) -> tuple[list[Any], list[Any]]:
    """Check the microbatches for a schedule's loop, and prepare its stages.

    Returns:
        The positional and the keyword arguments of each microbatch.
    """
    every_args, every_kwargs = schedule._check_inputs(args, kwargs, targets, losses)
    if not schedule._stages_initialized:
        schedule._initialize_stages(every_args[0], every_kwargs[0])
    return every_args, every_kwargs


def compute_loss(
    schedule: TorchSchedule,
    stage: Any,
    output: Any,
    targets: list[Any] | None,
    index: int,
) -> None:
    """Compute and keep the loss of a microbatch, if `stage` is the last one."""
    schedule._maybe_compute_loss(stage, output, targets, index)  # type: ignore[no-untyped-call]


def loss_of(schedule: TorchSchedule, stage: Any, index: int) -> Any:
    """Return the loss of a microbatch that `compute_loss` kept, None if there is none.

    Upstream raises for other stages when the last one is on the same rank and has not
    run this microbatch.
    """
    if not stage.is_last:
        return None
    return schedule._maybe_get_loss(stage, index)  # type: ignore[no-untyped-call]


def end_microbatches(schedule: ScheduleMulti, losses: list[Any] | None) -> None:
    """Put the losses of a step into the caller's list."""
    schedule._update_losses(schedule._stages, losses)  # type: ignore[no-untyped-call]


def order_of(schedule: TorchSchedule) -> Schedule | None:
    """Return the actions of all ranks under `schedule`, None if they are not known.

    A schedule with several stages per rank has its actions in a table. One with a
    single stage per rank has them in its code: they are known for GPipe and 1F1B. The
    table of upstream 2.9 for 1F1B differs from its code, so it is not used.
    """
    if isinstance(schedule, ScheduleMulti):
        cells = order_in_cells(schedule)
        return Schedule.from_cells(cells) if cells else None
    if runs_as(schedule, ScheduleGPipe):
        return gpipe(num_stages(schedule), num_microbatches(schedule))
    if runs_as(schedule, Schedule1F1B):
        return one_f_one_b(num_stages(schedule), num_microbatches(schedule))
    return None


class SilentStage(_PipelineStageBase):
    """A stage without communication for a schedule to do.

    Its actions send and receive themselves, so it answers with empty lists when a
    schedule asks for send and receive operations, and ignores what a schedule passes
    between two stages of one rank. `scale_grads` is ignored as well: upstream 2.9 calls
    it in `eval` too, and not after the backward-weight actions of
    `_PipelineScheduleRuntime`.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return nothing: there is no connection to set up."""
        return []

    def _prepare_backward_infra(self, num_microbatches: int) -> None:
        """Do nothing: a backward needs no buffers and no agreement of its own."""

    def _create_grad_recv_info(self, act_send_info: dict[Any, Any]) -> tuple[Any, ...]:
        """Return nothing: gradients are received by the backward itself."""
        return ()

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Do nothing: gradients were scaled on their way, see `runtime.rank`."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return nothing: the forward receives by itself."""
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return nothing: the forward sends by itself."""
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return nothing: the backward receives by itself."""
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return nothing: the backward sends by itself."""
        return []

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Do nothing: stages of one rank exchange values by themselves."""

    def get_local_bwd_output(self, mb_index: int) -> tuple[Any, ...]:
        """Return nothing: stages of one rank exchange gradients by themselves."""
        return ()

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Any, ...], mb_index: int
    ) -> None:
        """Do nothing: stages of one rank exchange gradients by themselves."""
