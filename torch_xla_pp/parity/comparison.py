"""One step of a pipeline beside the same step of the unsplit model.

The unsplit model runs on the host of the rank that has the last stage: it has the
outputs and losses already; gradients of other stages are sent there, one by one. The
model runs the whole batch at once, so that a wrong factor is seen as well as a wrong
value. Only if results differ, it also runs microbatch by microbatch, to report which of
the two the pipeline agrees with.

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
    gradients, and buffers after the step, are compared with those of the model for the
    whole batch, on the host of the rank that has the last stage. Each replica has its
    own part of the batch: gradients are compared with the mean over all parts.

    If `model` is the one that the stages were cut from, it is run with the values that
    they have now; if it is another one, such as a copy, the values of the parameters
    are compared, too. Everything is left as it was before. For a large model, compare
    some of the parameters: the others need no memory for gradients.

    Args:
        model: The unsplit model.
        schedule: The schedule to verify; its `eval` if it has no loss function. Or this
            rank's stages, which then take the batch as one microbatch.
        args: Positional arguments of the model, a tensor or a tuple.
        target: Second argument of the loss function.
        kwargs: Keyword arguments of the model, which the first stage takes.
        loss_fn: The loss function, for stages only; a schedule has its own.
        parameters: Glob patterns on the names of parameters whose gradients to compare.
        tolerance: The largest difference that counts as rounding, relative to the
            largest element of a value; None for a default by the parameters' dtypes.

    Returns:
        The comparison, equal on all ranks; `print` it on one of them.

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
            brought = _Brought(
                values=values,
                grads=grads,
                buffers=buffers,
                step=step,
                calls=pipeline.calls_of_replicas(call),
            )
            found = _compare(pipeline, brought, tolerance)
        exchanged: list[Any] = pipeline.group.rendezvous.exchange("verification", found)
    verification: Verification = exchanged[root]
    return verification


@dataclass(frozen=True, kw_only=True, slots=True)
class _Brought:
    """The values of the stages of all ranks, by the model's names, on the host.

    `values` are those before the step, `buffers` those after it. `calls` are those of
    all replicas, first this one's.
    """

    values: dict[str, Tensor]
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]
    step: StepResult
    calls: list[Call]


def _compare(
    pipeline: ComparedPipeline, brought: _Brought, tolerance: float | None
) -> Verification:
    """Run the unsplit model, and compare all results of the pipeline."""
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
    own, *others = brought.calls
    outputs, loss = unsplit.run(own, 1 / len(brought.calls))
    if pipeline.is_trained and others:
        beside = _unsplit(pipeline, brought)
        for call in others:
            beside.run(call, 1 / len(brought.calls))
        unsplit.add_gradients(beside)
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
    return replace(found, notes=_notes(pipeline, brought, found.tolerance))


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
    """Compare outputs; for a scalar output a schedule returns one per microbatch."""
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
    """Compare gradients; a missing one counts as zeros."""
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
    pipeline: ComparedPipeline, brought: _Brought, tolerance: float
) -> tuple[str, ...]:
    """Return hints at what may explain differences."""
    if _unsplit(pipeline, brought).draws_random_numbers(brought.calls[0]):
        return (
            "note: the model draws random numbers, such as of dropout, and another "
            "process draws others. Set their probability to 0, or call eval() first.",
        )
    if not pipeline.is_trained:
        return ()
    unsplit = _unsplit(pipeline, brought)
    scale = pipeline.rank.grad_scale
    for call in brought.calls:
        for microbatch in _microbatches(pipeline, call):
            unsplit.run(microbatch, scale / len(brought.calls))
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
        exchanged = group.rendezvous.exchange("stages to verify", indices)
    rows = [
        [f"{index}F0" for index in row] + [f"{index}B0" for index in reversed(row)]
        for row in exchanged
    ]
    return ScheduleFromTable(own, Schedule.from_cells(rows), loss_fn)
