"""One step of a pipeline beside the same step of the unsplit model.

The unsplit model runs on the host of the rank that has the last stage: there the
outputs and losses are already; gradients of other stages are sent there, one by one.
It runs the whole batch at once, so that a wrong factor is seen as well as a wrong
value. Only when that differs it runs microbatch by microbatch, to say which of both
the pipeline agrees with.

Law: a verification leaves parameters, buffers, gradients and the count of steps as
they were.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_xla_pp.parity.compared_pipeline import ComparedPipeline, StepResult
from torch_xla_pp.parity.unsplit import (
    Call,
    UnsplitModel,
    host_copy,
    precisions,
)
from torch_xla_pp.parity.verification import (
    Difference,
    Verification,
    default_tolerance,
    largest_of,
)
from torch_xla_pp.runtime import PipelineStage, ScheduleFromTable
from torch_xla_pp.schedule import Schedule
from torch_xla_pp.torch_compat import TorchSchedule, split_batch

# Gradients this much smaller than the largest of the model are its rounding errors.
_FLOOR = 1e-2


def verify(
    model: nn.Module,
    schedule: Any,
    args: Any,
    target: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    parameters: str | Sequence[str] = "*",
    tolerance: float | None = None,
) -> Verification:
    """Compare one step of a pipeline with the unsplit model.

    All ranks of the pipeline must call it, with the same batch. Outputs, the loss and
    gradients are compared with what the model gives for the whole batch on the host of
    the rank that has the last stage; so are, after the step, buffers. If `model` is
    the one that the stages were cut from, it is run with the values that they have now;
    if it is another one, such as a copy, the values of the parameters are compared,
    too. Everything is left as it was before. For a large model, compare some of the
    parameters: the others need no memory for gradients.

    Args:
        model: The unsplit model.
        schedule: The schedule to be tried; without a loss function, its `eval` is. Or
            this rank's stages, which then take the batch as one microbatch.
        args: Positional arguments of the model, a tensor or a tuple.
        target: What the loss function gets beside the output.
        kwargs: Keyword arguments of the model, which the first stage takes.
        loss_fn: The loss function; only for stages, a schedule has its own.
        parameters: Glob patterns on the names of parameters whose gradients to compare.
        tolerance: The largest difference that is rounding, relative to the largest
            element of a value; None for what the parameters' dtypes let expect.

    Returns:
        What was compared, equal on all ranks; `print` it on one of them.

    Raises:
        ValueError: The ranks have different batches, or the stages' names are not the
            model's; on every rank.

    Example:
        >>> report = xpp.verify(model, schedule, x, y)
        >>> if stage.is_last: print(report)
        >>> assert report.is_equal
    """
    patterns = (parameters,) if isinstance(parameters, str) else tuple(parameters)
    call: Call = (
        args if isinstance(args, tuple) else (args,),
        dict(kwargs or {}),
        target,
    )
    run = schedule if isinstance(schedule, TorchSchedule) else _run(schedule, loss_fn)
    pipeline = ComparedPipeline(run, model, patterns)
    with pipeline.group.rendezvous.reporting("in verify"):
        root = pipeline.agree(call)
        values = pipeline.bring(root, pipeline.values())
        step = pipeline.step(call)
        grads = pipeline.bring(root, step.grads)
        buffers = pipeline.bring(root, step.buffers)
        found = None
        if pipeline.group.rank() == root:
            brought = _Brought(values=values, grads=grads, buffers=buffers, step=step)
            found = _compare(pipeline, host_copy(call), brought, tolerance)
        told: list[Any] = pipeline.group.rendezvous.exchange("verification", found)
    verification: Verification = told[root]
    return verification


@dataclass(frozen=True, kw_only=True, slots=True)
class _Brought:
    """What the stages of all ranks have, by the model's names, on the host.

    `values` are those before the step, `buffers` those after it.
    """

    values: dict[str, Tensor]
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]
    step: StepResult


def _compare(
    pipeline: ComparedPipeline, call: Call, brought: _Brought, tolerance: float | None
) -> Verification:
    """Run the unsplit model, and compare all that the pipeline gave."""
    unsplit = _unsplit(pipeline, brought)
    named = unsplit.named()
    differences = []
    if not pipeline.is_cut_from_model:
        differences = [
            Difference.of(
                "parameter" if isinstance(named[name], nn.Parameter) else "buffer",
                name,
                value,
                named[name],
            )
            for name, value in brought.values.items()
        ]
    outputs, loss = unsplit.run(call, 1.0)
    differences += _output_differences(brought.step.outputs, outputs)
    if loss is not None and brought.step.losses:
        total = torch.stack(brought.step.losses).sum() * pipeline.rank.grad_scale
        differences.append(Difference.of("loss", "loss", total, loss))
    differences += _gradient_differences(brought.grads, named)
    differences += [
        Difference.of("buffer", name, value, named[name])
        for name, value in brought.buffers.items()
    ]
    dtypes = {value.dtype for value in brought.values.values()} | precisions()
    found = Verification(
        title=f"{pipeline.title}, beside the model on rank {pipeline.group.rank()}",
        differences=tuple(differences),
        tolerance=default_tolerance(dtypes) if tolerance is None else tolerance,
    )
    if found.is_equal:
        return found
    return replace(found, notes=_notes(pipeline, call, brought, found.tolerance))


def _unsplit(pipeline: ComparedPipeline, brought: _Brought) -> UnsplitModel:
    return UnsplitModel(
        pipeline.model,
        brought.values if pipeline.is_cut_from_model else {},
        pipeline.compared,
        pipeline.rank.loss_function if pipeline.is_trained else None,
        training=pipeline.training,
        ties=pipeline.ties,
    )


def _output_differences(
    got: Sequence[Tensor], expected: Sequence[Tensor]
) -> list[Difference]:
    """Compare outputs; of a scalar a schedule returns one per microbatch."""
    found = []
    for index in range(max(len(got), len(expected))):
        name = "output" if len(expected) == 1 else f"output[{index}]"
        ours = got[index] if index < len(got) else None
        wanted = expected[index] if index < len(expected) else None
        if wanted is not None and ours is not None and wanted.dim() < ours.dim() == 1:
            ours = ours.mean()
        found.append(Difference.of("output", name, ours, wanted))
    return found


def _gradient_differences(
    got: Mapping[str, Tensor], model: Mapping[str, Tensor]
) -> list[Difference]:
    """Compare gradients; one that is not there counts as zeros."""
    wanted = {name: value.grad for name, value in model.items()}
    floor = _FLOOR * largest_of([grad for grad in wanted.values() if grad is not None])
    found = []
    seen = set()
    for name, ours in got.items():
        seen.add(id(model[name]))
        grad = wanted[name]
        expected = torch.zeros_like(ours) if grad is None else grad
        found.append(Difference.of("gradient", name, ours, expected, floor=floor))
    for name, grad in wanted.items():
        if grad is not None and id(model[name]) not in seen:
            seen.add(id(model[name]))
            zeros = torch.zeros_like(grad)
            found.append(Difference.of("gradient", name, zeros, grad, floor=floor))
    return found


def _notes(
    pipeline: ComparedPipeline, call: Call, brought: _Brought, tolerance: float
) -> tuple[str, ...]:
    """Say what may explain differences."""
    if _unsplit(pipeline, brought).draws_random_numbers(call):
        return (
            "note: the model draws random numbers, such as of dropout, and another "
            "process draws others. Set their probability to 0, or call eval() first.",
        )
    if not pipeline.is_trained:
        return ()
    unsplit = _unsplit(pipeline, brought)
    scale = pipeline.rank.grad_scale
    for microbatch in _microbatches(pipeline, call):
        unsplit.run(microbatch, scale)
    found = _gradient_differences(brought.grads, unsplit.named())
    if not all(difference.relative <= tolerance for difference in found):
        return ()
    return (
        "note: the gradients are those of the model run microbatch by microbatch, each "
        f"loss multiplied by {scale:g}. What differs comes of cutting the batch: of a "
        "loss that is not a mean over rows, of scale_grads, or of BatchNorm.",
    )


def _microbatches(pipeline: ComparedPipeline, call: Call) -> Iterator[Call]:
    """Cut a batch as the schedule does."""
    args, kwargs, target = call
    count = pipeline.rank.num_microbatches
    every_args, every_kwargs = split_batch(pipeline.schedule, args, kwargs)
    targets = [None] * count if target is None else torch.tensor_split(target, count)
    yield from zip(every_args, every_kwargs, targets, strict=True)


def _run(
    stages: PipelineStage | Sequence[PipelineStage],
    loss_fn: Callable[[Any, Any], Any] | None,
) -> TorchSchedule:
    """Make a schedule that runs stages on one microbatch."""
    own = [stages] if isinstance(stages, PipelineStage) else list(stages)
    indices = sorted(stage.stage_index for stage in own)
    group = own[0].process_group
    with group.rendezvous.reporting("in verify"):
        told = group.rendezvous.exchange("stages to verify", indices)
    rows = [
        [f"{index}F0" for index in row] + [f"{index}B0" for index in reversed(row)]
        for row in told
    ]
    return ScheduleFromTable(own, Schedule.from_cells(rows), loss_fn)
