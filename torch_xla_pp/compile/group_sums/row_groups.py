"""Sums over the rows of a batch, kept apart for each group of rows.

A *group* is the part of a batch that the devices at one position along the batch axis
hold. A sum per group has a first dimension of one entry per group, split over that
axis, so that each device adds up its own part and exchanges nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.group_sums.batch_dims import Place

WHOLE, PARTS = -1, -2
"""What `RowGroups.apply` accepts for an operand in place of a dimension."""


class RowGroups:
    """Sums per group; the methods are targets of nodes in graphs.

    Args:
        size: The number of groups.
        layout: Takes a number of dimensions and one of them, None for none; returns
            the sharding of a value that is split there over the batch axis.
    """

    def __init__(
        self, size: int, layout: Callable[[int, int | None], xla_compat.OpSharding]
    ) -> None:
        self.size = size
        self._layout = layout

    def split(self, value: Tensor, dim: int, outer: int) -> Tensor:
        """Return the groups of a value, in a new first dimension.

        Args:
            value: The value.
            dim: The dimension to take them from, which stays at its place.
            outer: See `Place`.
        """
        before, after = value.shape[:dim], value.shape[dim + 1 :]
        parts = value.reshape(*before, outer, self.size, -1, *after)
        return parts.movedim(dim + 1, 0).reshape(self.size, *before, -1, *after)

    def product(self, left: Tensor, right: Tensor, outer: int) -> Tensor:
        """Multiply matrices or stacks of them, `(..., M, K)` and `(..., K, N)`.

        Returns:
            The part of each group of K, `(groups, ..., M, N)`.
        """
        count = left.dim()
        first = self.split(left, count - 1, outer)
        second = self.split(right, count - 2, outer)
        sums = [count], [count - 1]
        return xla_compat.product(first, second, sums, range(count - 1))

    def sum(
        self,
        value: Tensor,
        place: Sequence[int],
        dims: Sequence[int],
        keepdim: bool,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Sum over `dims`, among them that of the batch, whose place is given."""
        parts = self.split(value, *Place(*place))
        return parts.sum([dim + 1 for dim in dims], keepdim=keepdim, dtype=dtype)

    def apply(
        self, op: OpOverload, item: int | None, dims: Sequence[int], args: Any
    ) -> Tensor:
        """Run an operation on each device's rows: one whose results add up.

        Devices along axes other than the batch axis do the same work.

        Args:
            op: The operation.
            item: Which of its results, None if it has one.
            dims: For each tensor in `args` the dimension of the batch, which has no
                `outer`; `WHOLE` if it has none; `PARTS` if it is a sum per group.
            args: The operation's arguments.
        """
        leaves, spec = pytree.tree_flatten(args)
        left = iter(dims)
        local = [
            self._rows(leaf, next(left)) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        result = op(*pytree.tree_unflatten(local, spec))
        value = result if item is None else result[item]
        shape = (self.size, *value.shape)
        part = xla_compat.manual(value.unsqueeze(0))
        sharding = self._layout(len(shape), 0)
        return xla_compat.from_shards(part, sharding, shape, value.dtype)

    def _rows(self, value: Tensor, dim: int) -> Tensor:
        """Return one device's rows of an operand, or its part of a sum."""
        split = {WHOLE: None, PARTS: 0}.get(dim, dim)
        rows = xla_compat.to_shards(value, self._layout(value.dim(), split))
        return rows.squeeze(0) if dim == PARTS else rows
