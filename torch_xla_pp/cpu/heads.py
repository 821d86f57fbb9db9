"""Attention and its gradients, in programs for CPU devices.

XLA computes it by products of whole matrices and loops over all scores between them.
The calls of `csrc/` have the scores of some rows and keys at a time, which stay in the
processor's caches, and leave out those that causality hides. They multiply by the same
library as products do, and read queries, keys and values where they lie.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_xla_pp.cpu.handlers import (
    bits_of,
    call_handler,
    has_ops_of_parts,
    has_own_ops,
)
from torch_xla_pp.cpu.products import library_product, library_product_of_parts


class Strided(NamedTuple):
    """A value that lies in another one.

    Attributes:
        value: The other one, float32.
        view: A tensor without data that has the shape, the strides and the offset.
    """

    value: Tensor
    view: Tensor


def has_attention() -> bool:
    """Return whether programs call these ops: on one CPU device that has a library."""
    return has_own_ops() and library_product() is not None


def has_attention_of_parts() -> bool:
    """Return whether programs for several devices call these ops on parts."""
    return has_ops_of_parts() and library_product_of_parts() is not None


def is_read_in_place(view: Tensor) -> bool:
    """Return whether the ops can read a view's matrices, the last two dimensions."""
    rows, width = view.shape[-2:]
    down, along = view.stride()[-2:]
    return (along == 1 or width == 1) and (down >= width or rows == 1)


class Scores(NamedTuple):
    """What scores are made of.

    Attributes:
        query: `(batch, heads, length, head_dim)`, read in place.
        key: Likewise, the keys.
        value: Likewise, the values.
        mask: What a query sees of the keys, bool, `(batch, heads, length, keys)`, where
            all but the last may be 1; None for all.
        is_causal: Whether a query sees only the keys up to its own place.
        scale: Factor of the scores.
    """

    query: Strided
    key: Strided
    value: Strided
    mask: Tensor | None
    is_causal: bool
    scale: float

    @property
    def operands(self) -> list[Tensor]:
        """The values in which queries, keys and values lie."""
        return [self.query.value, self.key.value, self.value.value]

    @property
    def masks(self) -> list[Tensor]:
        """The mask, if there is one."""
        return [] if self.mask is None else [self.mask]

    def fields(self) -> dict[str, int]:
        """Return the attributes of the ops."""
        batch, heads, rows, width = self.query.view.shape
        sizes = [1] * 4 if self.mask is None else self.mask.shape
        steps = torch.empty(sizes, device="meta").stride()
        alike = [s if n > 1 else 0 for n, s in zip(sizes, steps, strict=True)]
        of_mask = zip(("batch", "head", "row"), alike[:3], strict=True)
        return {
            "batch": batch,
            "heads": heads,
            "rows": rows,
            "keys": self.key.view.shape[2],
            "width": width,
            "is_causal": int(self.is_causal),
            "has_mask": int(self.mask is not None),
            "scale": bits_of(self.scale),
            **_layout("query", self.query.view),
            **_layout("key", self.key.view),
            **_layout("value", self.value.view),
            "mask_offset": 0,
            **{f"mask_{name}": step for name, step in of_mask},
        }


def attend(scores: Scores) -> list[Tensor]:
    """Compute attention, as `graph.plain_attention` does.

    Returns:
        The result, `(batch, length, heads, head_dim)`, and for each row of scores the
        sum of exponentials and the maximum.
    """
    batch, heads, rows, width = scores.query.view.shape
    shapes = [[batch, rows, heads, width], *[[batch, heads, rows]] * 2]
    given = [*scores.operands, *scores.masks]
    return call_handler("attention", given, shapes, scores.fields())


def attend_grad(
    grad: Strided,
    scores: Scores,
    kept: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    places: Sequence[tuple[int, Tensor]],
) -> list[Tensor]:
    """Compute the gradients of queries, keys and values.

    Args:
        grad: The gradient of the result, with its dimensions in the order of queries.
        scores: As in `attend`.
        kept: What `attend` returned.
        shapes: The shapes of values that hold the gradients.
        places: For each gradient, which of these holds it, and a view of that one.

    Returns:
        The values that hold the gradients.
    """
    fields = scores.fields() | _layout("grad", grad.view)
    for name, (place, view) in zip(("query", "key", "value"), places, strict=True):
        fields |= {f"{name}_grad_result": place, **_layout(f"{name}_grad", view)}
    given = [grad.value, *scores.operands, *kept, *scores.masks]
    return call_handler("attention_grad", given, shapes, fields)


def _layout(name: str, view: Tensor) -> dict[str, int]:
    batch, head, row, _ = view.stride()
    found = {"offset": view.storage_offset(), "batch": batch, "head": head}
    # A library wants rows that could lie one after another, even if there is one.
    found["row"] = max(row, view.shape[-1])
    return {f"{name}_{field}": int(number) for field, number in found.items()}
