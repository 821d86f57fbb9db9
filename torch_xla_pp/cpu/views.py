"""Copies of views of values, in programs for CPU devices.

A product takes its factors in the order of rows. Where a graph copies a view for that,
as attention does of its heads, XLA makes one loop for the product, another for what is
saved of it, and often a third one that turns it. Here it is one call of `csrc/`.
"""

import math
from collections.abc import Collection, Sequence

from torch import Tensor

from torch_xla_pp.cpu.handlers import bits_of, call_handler

_MAX_DIMS = 4


def copied_view(value: Tensor, view: Tensor, factor: float) -> Tensor | None:
    """Copy a view of a float32 value into the order of rows, times a factor.

    Args:
        value: The value.
        view: A tensor without data that has the view's shape, strides and offset.
        factor: What each element is multiplied with.

    Returns:
        The copy, of the view's shape; None if the view has more than four dimensions,
        where those that lie one in the other count as one.
    """
    dims = _merged(list(zip(view.shape, view.stride(), strict=True)))
    if len(dims) > _MAX_DIMS:
        return None
    dims = [(1, 0)] * (_MAX_DIMS - len(dims)) + dims
    fields = {"offset": int(view.storage_offset()), "factor": bits_of(factor)}
    fields |= {f"size_{i}": size for i, (size, _) in enumerate(dims)}
    fields |= {f"stride_{i}": stride for i, (_, stride) in enumerate(dims)}
    return call_handler("copy", [value], [view.shape], fields)[0]


def split(value: Tensor, shapes: Collection[Sequence[int]]) -> list[Tensor]:
    """Copy a float32 value's pieces, which lie one behind the other.

    Args:
        value: The value, flat.
        shapes: Those of the pieces, none of them empty.
    """
    fields = {f"size_{i}": math.prod(shape) for i, shape in enumerate(shapes)}
    return call_handler("split", [value], [*shapes], fields)


def _merged(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sizes and strides with dimensions joined that lie one in the other."""
    merged: list[tuple[int, int]] = []
    for size, stride in dims:
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = merged[-1][0] * size, stride
        else:
            merged.append((size, stride))
    return merged
