"""The operations that only show a value in another form, in one table.

They compute nothing, so every pass over a stage's graph has to treat them:
what is worth saving (`partition`), where the batch is (`group_sums.batch_dims`), how
sums of parts go through them (`group_sums.part_rules`), which factors of a product they
hide (`product_rules`). An operation that is added here is known to all of these.

========== =======================================================================
Form       What the result is
========== =======================================================================
same       the value
expand     the value, repeated along dimensions of size one or along new ones
permute    the value, its dimensions in another order, see `permutation`
view       the same numbers in the same order, in other dimensions
squeeze    likewise, but only dimensions of size one come or go
select     one entry of a dimension, which goes
slice      some entries of a dimension
pieces     several results: all entries of a dimension, in order
========== =======================================================================
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload

Form: TypeAlias = Literal[
    "same", "expand", "permute", "view", "squeeze", "select", "slice", "pieces"
]

_aten = torch.ops.aten

VIEWS: Mapping[OpOverload, Form] = {
    _aten.alias.default: "same",
    _aten.detach.default: "same",
    _aten.expand.default: "expand",
    _aten.permute.default: "permute",
    _aten.select.int: "select",
    _aten.slice.Tensor: "slice",
    _aten.split.Tensor: "pieces",
    _aten.split_with_sizes.default: "pieces",
    _aten.squeeze.default: "squeeze",
    _aten.squeeze.dim: "squeeze",
    _aten.squeeze.dims: "squeeze",
    _aten.t.default: "permute",
    _aten.transpose.int: "permute",
    _aten.unbind.int: "pieces",
    _aten.unsqueeze.default: "squeeze",
    _aten.view.default: "view",
    _aten._unsafe_view.default: "view",
}


def views(*forms: Form) -> frozenset[OpOverload]:
    """Return the operations of some forms."""
    return frozenset(op for op, form in VIEWS.items() if form in forms)


def wrapped(dims: int | Sequence[int], count: int) -> list[int]:
    """Return dimensions of a value of `count`, counted from the front."""
    listed = [dims] if isinstance(dims, int) else dims
    return [dim % count if count else 0 for dim in listed]


def permutation(node: fx.Node, count: int) -> list[int]:
    """Return the order in which `node` puts the dimensions of a value of `count`."""
    order = list(range(count))
    if node.target is _aten.permute.default:
        return wrapped(node.args[1], count)  # type: ignore[arg-type]
    first, second = wrapped(node.args[1:] or (0, 1), count)  # type: ignore[arg-type]
    if count > 1:
        order[first], order[second] = order[second], order[first]
    return order


def is_transpose(node: fx.Node, count: int) -> bool:
    """Return whether `node` swaps the last two dimensions of a value of `count`."""
    if VIEWS.get(node.target) != "permute" or count < 2:  # type: ignore[call-overload]
        return False
    return permutation(node, count) == [*range(count - 2), count - 1, count - 2]
