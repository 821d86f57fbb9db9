"""The losses and metrics of a step, on every rank that asks for them.

They are computed where the last stage is, and stay on its devices until all ranks ask.
Asking waits for the step; a step does not wait for ranks that may ask.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_xla_pp.compile import StageLoss
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.runtime.rank import RankPipeline


def losses(schedule: Any) -> Tensor:
    """Return the losses of the last step or `eval`, on all ranks of the pipeline.

    All of them must call it. Waits for the step.

    Args:
        schedule: The schedule that ran the step.

    Returns:
        The loss of each microbatch, `(num_microbatches,)`, on the host.

    Raises:
        PipelineError: No loss was computed, as there was no step or no `loss_fn`.

    Example:
        >>> schedule.step(x)
        >>> print(xpp.losses(schedule).mean().item())
    """
    return torch.stack(_of_last_stage(schedule, "losses", lambda loss: loss.losses))


def metrics(schedule: Any) -> Any:
    """Return what `loss_fn` returns beside the loss, summed over microbatches.

    A loss function may return a tuple of the loss and metrics: tensors of any shape, in
    dicts, lists and tuples. For a mean, return a sum and a count. All ranks of the
    pipeline must call it, after a step. Waits for the step.

    Args:
        schedule: The schedule that ran the step.

    Returns:
        The metrics of the step as `loss_fn` returns them, on the host.

    Raises:
        PipelineError: As for `losses`.

    Example:
        >>> def loss_fn(logits, target):
        ...     right = (logits.argmax(-1) == target).sum()
        ...     return F.cross_entropy(logits, target), {"right": right}
        >>> schedule.step(x)
        >>> print(xpp.metrics(schedule)["right"].item())
    """
    every = _of_last_stage(schedule, "metrics", lambda loss: loss.metrics)
    return pytree.tree_map(_sum, *every)


def _sum(*values: Any) -> Any:
    """Add tensors up; of other values return the last."""
    if isinstance(values[0], Tensor):
        return torch.stack(values).sum(0)
    return values[-1]


def _of_last_stage(
    schedule: Any, what: str, kept: Callable[[StageLoss], dict[int, Any]]
) -> list[Any]:
    """Return on all ranks a value that the rank of the last stage has kept."""
    rank = RankPipeline.of(schedule)
    rendezvous = rank.stages[0].process_group.rendezvous
    with rendezvous.reporting(f"in {what}"):
        by_index = {} if rank.loss is None else kept(rank.loss)
        found = [by_index[index] for index in sorted(by_index)]
        own = pytree.tree_map_only(Tensor, lambda value: value.cpu(), found)
        exchanged: list[list[Any]] = rendezvous.exchange(what, own)
    every = next(filter(None, exchanged), None)
    if every is None:
        raise PipelineError(
            f"{what}: expected a step with losses, got none. Call it after the "
            "schedule's step or eval, and give the schedule a loss_fn."
        )
    return every
