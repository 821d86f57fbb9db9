"""Batches with too few rows, padded so that they train as without padding."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_xla_pp.compile import RowWeights
from torch_xla_pp.runtime import RankPipeline


def pad_batch(
    schedule: Any,
    *batch: Any,
    rows: int | Sequence[int],
    reduction: Literal["mean", "sum"] = "mean",
) -> Any:
    """Pad a short batch, and let the next step of a schedule count only its own rows.

    Losses, gradients and metrics of that step are those of the short batch: the loss is
    computed row by row, and rows that were added weigh nothing. So `loss_fn` must be a
    mean or a sum over rows, which the step checks when it ends; and rows must not
    influence each other in the model, as by BatchNorm. The rows that are added are the
    first ones again. Outputs include them: take the first rows. A batch that has `rows`
    rows is returned as it is.

    All ranks of the pipeline must call it, each before it calls `step` or `eval`.

    Args:
        schedule: The schedule that runs the next step.
        *batch: Tensors with rows in dimension 0, alone or in lists, tuples and dicts;
            all have equally many.
        rows: How many the batch is to have; or several numbers, of which the smallest
            sufficient one is taken. Then at most that many kinds of steps are compiled.
        reduction: What `loss_fn` does over rows.

    Returns:
        The batch: one value or a tuple, as given.

    Raises:
        ValueError: The batch has no rows, or more than `rows`, or different numbers.

    Example:
        >>> for x, y in loader:
        ...     x, y = xpp.pad_batch(schedule, x, y, rows=64)
    """
    sizes = sorted([rows] if isinstance(rows, int) else rows)
    count = _rows_of(batch)
    full = next((size for size in sizes if size >= count), 0)
    if not full:
        raise ValueError(
            f"pad_batch: expected at most {max(sizes, default=0)} rows, got {count}. "
            "Give rows= the size of the loader's batches."
        )
    loss = RankPipeline.of(schedule).loss
    if loss is not None:
        loss.next_weights = None
    if count < full:
        index = torch.arange(full) % count
        batch = pytree.tree_map_only(Tensor, lambda value: _taken(value, index), batch)
        if loss is not None:
            num_microbatches = RankPipeline.of(schedule).num_microbatches
            weight = num_microbatches / count if reduction == "mean" else 1.0
            weights = torch.where(torch.arange(full) < count, weight, 0.0)
            loss.next_weights = RowWeights(weights, reduction)
    return batch if len(batch) != 1 else batch[0]


def _taken(value: Tensor, index: Tensor) -> Tensor:
    return value.index_select(0, index.to(value.device))


def _rows_of(batch: Any) -> int:
    counts = {
        value.shape[0] if value.dim() else 0
        for value in pytree.tree_leaves(batch)
        if isinstance(value, Tensor)
    }
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            "pad_batch: expected tensors with the same number of rows, at least one, "
            f"got {sorted(counts) or 'none'}. Pass the batch and its target."
        )
    return counts.pop()
