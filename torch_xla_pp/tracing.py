"""Trace a model: to cut it into stages, or to count its work.

Both see the same operations under the same names, so that a plan made from the one can
be applied to the other.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from torch_xla_pp.compile import (
    cost_of_loss,
    marking_checkpoints,
    returned_by,
    unknown_ops,
    work_of,
)
from torch_xla_pp.deferred import as_on_host, back_to_meta, parameter_names
from torch_xla_pp.graph import (
    indexing_by_tensors,
    keeping_autograd_functions,
    sharding_outputs,
    untied,
)
from torch_xla_pp.launch import device
from torch_xla_pp.mesh import LogicalAxes
from torch_xla_pp.torch_pipe import SPLIT_MARK, trace
from torch_xla_pp.work import WorkGraph


@contextlib.contextmanager
def tracing(
    module: nn.Module,
    names: Sequence[tuple[str, ...]],
    activations: Mapping[str, LogicalAxes],
) -> Iterator[Callable[[Any], Any]]:
    """Let torch.export trace a model as it is traced for stages.

    Args:
        module: The model, as before afterwards.
        names: All names of each of its parameters.
        activations: As for `pipeline`.

    Yields:
        A function that adapts an example of the model's arguments to it.
    """
    with (
        marking_checkpoints(),
        keeping_autograd_functions(),
        as_on_host(module) as faked,
        indexing_by_tensors(),
        untied(module, names),
        sharding_outputs(module, activations),
    ):
        yield faked


def trace_work(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    *,
    activations: Mapping[str, LogicalAxes] | None = None,
    max_stages: int = 16,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
) -> WorkGraph:
    """Trace a model and return its work, for a planner.

    Nothing is computed, and a model on meta or under `deferred_init` takes no memory.
    As the operations are those of XLA devices, the process is set up for them, as by
    `device()`.

    Args:
        module: The model, in the mode in which it will run.
        mb_args: Example of one microbatch's positional arguments.
        mb_kwargs: Example of its keyword arguments.
        activations: As for `pipeline`, which must then be given the same.
        max_stages: The most stages for which parts of the work are to be small enough.
        loss_fn: Takes the model's output and the target, returns a scalar. Its cost
            is added to the last stage's backward; without it, plans warn.
        target: Example of one microbatch's target.

    Raises:
        PipelineError: The model cannot be traced, or has operations that cannot be
            split.
    """
    device()
    names = parameter_names(module)
    with tracing(module, names, dict(activations or {})) as faked:
        args, kwargs = faked((mb_args, mb_kwargs))
        traced = trace(module, args, kwargs)
    back_to_meta(traced)
    unknown, output = unknown_ops(traced), returned_by(traced)
    work = work_of(
        traced,
        SPLIT_MARK,
        names,
        max_stages=max_stages,
        source=type(module).__name__,
    )
    work = replace(work, unknown_ops=unknown)
    if loss_fn is None:
        return work
    return work.with_loss(cost_of_loss(output, loss_fn, target, work.rows))
