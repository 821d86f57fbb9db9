"""Where values lie in others, and the rule by which copies of views are calls of ours.

For CPU devices, see `lowering`. Attention copies its heads before they are
multiplied with a matrix.
"""

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torch_xla_pp.compile.ops import VIEWS
from torch_xla_pp.cpu import copied_view, fits_own_ops

_aten = torch.ops.aten
# Of a value of which a copy shows less, XLA may compute that part alone.
_LEAST_SHARE = 0.25


class Stored(NamedTuple):
    """How a value lies in another one, which is in the order of rows.

    A rule may note it for an operation, so that what follows reads the other value.

    Attributes:
        value: The other value, float32.
        view: A tensor without data that has the shape, the strides and the offset.
        steps: What makes the value of the other one.
        is_noted: Whether a rule has put it there.
    """

    value: Tensor
    view: Tensor
    steps: tuple[Callable[[Any], Any], ...] = ()
    is_noted: bool = False

    @classmethod
    def whole(cls, value: Tensor) -> "Stored":
        """Return how a value lies in itself."""
        return cls(value, torch.empty(value.shape, device="meta"))

    def then(self, step: Callable[[Any], Any]) -> "Stored | None":
        """Return how what a step shows of it lies; None if that is no view.

        It is none e.g. where dimensions are joined that are not one in the other.
        """
        try:
            view = step(self.view)
        except RuntimeError:
            return None
        return self._replace(view=view, steps=(*self.steps, step))

    @property
    def is_all(self) -> bool:
        """Whether it is the other one, but for its shape."""
        is_as_long = self.view.numel() == self.value.numel()
        return is_as_long and self.view.is_contiguous()

    @property
    def shown(self) -> Tensor:
        """The value, made of the other one."""
        result: Tensor = reduce(lambda value, step: step(value), self.steps, self.value)
        return result


def stored(
    node: fx.Node, values: Mapping[fx.Node, Any], notes: Mapping[fx.Node, Any]
) -> Stored | None:
    """Return how a value lies in the one that it is a view of; None if in none.

    Args:
        node: What makes it.
        values: What has run so far.
        notes: What rules have noted.
    """
    return _lies(node, values, notes, with_factors=False)[0]


def copy_views(
    node: fx.Node, values: Mapping[fx.Node, Any], notes: dict[fx.Node, Any], /
) -> Tensor | None:
    """Copy a float32 value whose dimensions are in another order than its own."""
    is_copy = node.target is _aten.clone.default
    if not is_copy or node.kwargs != {"memory_format": torch.contiguous_format}:
        return None
    source = node.all_input_nodes[0]
    found, factor = _lies(source, values, notes, with_factors=True)
    if found is None:
        return None
    value, view = found.value, found.view
    if view.is_contiguous():
        # Such a value XLA copies by itself, unless it was noted to lie in another.
        is_other = found.is_noted and found.is_all and factor == 1.0
        return value.reshape(view.shape) if is_other else None
    if view.numel() < _LEAST_SHARE * value.numel():
        return None
    return copied_view(value, view, factor)


def _lies(
    node: fx.Node,
    values: Mapping[fx.Node, Any],
    notes: Mapping[fx.Node, Any],
    *,
    with_factors: bool,
) -> tuple[Stored | None, float]:
    """Return how a value lies in another one, but for a factor."""
    noted, own = notes.get(node), _factor(node) if with_factors else None
    if isinstance(noted, Stored):
        return noted, 1.0
    if own is None and not _is_view(node):
        is_known = fits_own_ops(values[node])
        return Stored.whole(values[node]) if is_known else None, 1.0
    (source,) = node.all_input_nodes
    found, factor = _lies(source, values, notes, with_factors=with_factors)
    if own is not None:
        return found, factor * own
    shown = found and found.then(_step(node))
    if shown is None and fits_own_ops(values[node]):
        # What follows may be a view of it, even if it is none of the other one.
        return Stored.whole(values[node]), 1.0
    return shown, factor


def _step(node: fx.Node) -> Callable[[Any], Any]:
    """Return what a view does with a value, or with the pieces of one."""
    target: Any = node.target
    args: Any = node.args
    if target is _aten.clone.default:
        return lambda value: value
    return lambda value: target(value, *args[1:], **node.kwargs)


def _is_view(node: fx.Node) -> bool:
    """Return whether a node shows one value in another form, or is a piece of it.

    A copy does, too: all values have the same order in programs.
    """
    is_piece = node.target is operator.getitem
    made = node.all_input_nodes[0] if is_piece else node
    is_known = made.target in VIEWS or made.target is _aten.clone.default
    return is_known and len(made.all_input_nodes) == 1


def _factor(node: fx.Node) -> float | None:
    """Return the number that a node multiplies with, None if it is no such product."""
    is_product = node.target in (_aten.mul.Scalar, _aten.mul.Tensor)
    factor = node.args[1] if is_product else None
    return float(factor) if isinstance(factor, int | float) and factor else None
