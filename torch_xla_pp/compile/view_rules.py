"""The rule by which copies of views are calls of `csrc/`, see `lowering`.

For ranks of one CPU device. Attention copies its heads before it multiplies them.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from torch_xla_pp.compile.ops import VIEWS
from torch_xla_pp.cpu import copied_view, fits_own_ops

_aten = torch.ops.aten
# Of a value of which a copy shows less, XLA may compute that part alone.
_LEAST_SHARE = 0.25


def copy_views(
    node: fx.Node, values: Mapping[fx.Node, Any], _: object, /
) -> Tensor | None:
    """Copy a float32 value whose dimensions are in another order than its own."""
    is_copy = node.target is _aten.clone.default
    if not is_copy or node.kwargs != {"memory_format": torch.contiguous_format}:
        return None
    steps, factor = [node.all_input_nodes[0]], 1.0
    while (source := _source(steps[-1])) is not None:
        factor *= _factor(steps[-1]) or 1.0
        steps.append(source)
    base = values[steps.pop()]
    if not fits_own_ops(base):
        return None
    view = _view(base, steps[::-1])
    if view is None or view.is_contiguous():
        return None
    if view.numel() < _LEAST_SHARE * base.numel():
        return None
    return copied_view(base, view, factor)


def _source(node: fx.Node) -> fx.Node | None:
    """Return what a node is a view or a multiple of, None if it is neither."""
    is_piece = node.target is operator.getitem
    is_known = is_piece or node.target in VIEWS or _factor(node) is not None
    if not is_known or len(node.all_input_nodes) != 1:
        return None
    source = node.all_input_nodes[0]
    return source if not is_piece or source.target in VIEWS else None


def _factor(node: fx.Node) -> float | None:
    """Return the number that a node multiplies with, None if it is no such product."""
    is_product = node.target in (_aten.mul.Scalar, _aten.mul.Tensor)
    factor = node.args[1] if is_product else None
    return float(factor) if isinstance(factor, int | float) and factor else None


def _view(base: Tensor, steps: list[fx.Node]) -> Tensor | None:
    """Return a view without data of a value in the order of rows.

    None if it is none, as where dimensions are joined that are not one in the other.
    """
    found: Any = torch.empty(base.shape, device="meta")
    for step in steps:
        if _factor(step) is not None:
            continue
        target: Any = step.target
        args: Any = step.args
        try:
            found = target(found, *args[1:], **step.kwargs)
        except RuntimeError:
            return None
    return found if isinstance(found, Tensor) else None
