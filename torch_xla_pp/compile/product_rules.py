"""Rules for `shard` and for products of matrices, see `lowering`.

`Constraints` is for ranks that split values over their devices, as axis rules say.
Besides `shard`, products of matrices are computed in another way than by torch_xla.
PyTorch merges dimensions before a product: batch and heads in attention, batch and
sequence in a linear layer. If the second of them is split over devices, the merged
dimension is split in a way that XLA has no sharding for, and every device gathers all
of it. Here such dimensions are kept apart.

`LibraryProducts` is for ranks of one device: products are calls of a library, for which
a transposed matrix is passed as it was stored before.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.group_sums.row_groups import RowGroups
from torch_xla_pp.compile.ops import is_transpose, views
from torch_xla_pp.graph import SHARD, axes_of
from torch_xla_pp.mesh import LogicalAxes

_aten = torch.ops.aten
_MERGES = views("view")


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryProducts:
    """The rule by which a library multiplies matrices.

    Args:
        multiply: Takes two matrices as they are stored and whether each is transposed;
            returns None for what it cannot multiply.
    """

    multiply: Callable[[Tensor, Tensor, bool, bool], Tensor | None]

    def __call__(
        self, node: fx.Node, values: Mapping[fx.Node, Any], _: object, /
    ) -> Tensor | None:
        """Run `mm` and `addmm`."""
        if node.target is _aten.mm.default:
            return self._product(values, *node.args)
        if node.target is _aten.addmm.default and not node.kwargs:
            bias: Any = node.args[0]
            product = self._product(values, *node.args[1:])
            return None if product is None else product + values[bias]
        return None

    def _product(
        self, values: Mapping[fx.Node, Any], left: Any, right: Any
    ) -> Tensor | None:
        left, is_left_turned = _stored(left)
        right, is_right_turned = _stored(right)
        return self.multiply(
            values[left], values[right], is_left_turned, is_right_turned
        )


def _stored(node: fx.Node) -> tuple[fx.Node, bool]:
    """Return a matrix as it was before it was transposed, and whether it was."""
    is_turned = False
    while is_transpose(node, 2):
        node = node.all_input_nodes[0]
        is_turned = not is_turned
    return node, is_turned


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraints:
    """The rule by which values are sharded as axis rules say.

    Args:
        layout: Takes the logical axes that `shard` was called with.
    """

    layout: Callable[[LogicalAxes], xla_compat.OpSharding]

    def __call__(
        self, node: fx.Node, values: Mapping[fx.Node, Any], notes: dict[fx.Node, Any], /
    ) -> Tensor | None:
        """Run `shard`, products, and views of products that are kept apart."""
        if node.target is SHARD:
            value: Any = node.args[0]
            axes = axes_of(node.args[1])  # type: ignore[arg-type]
            return xla_compat.constrain(values[value], self.layout(axes))
        return _Products(values, notes).run(node)


class _Apart(NamedTuple):
    """A value whose first dimensions are merged in the graph, but not here.

    Attributes:
        value: It has `sizes` in place of the merged dimension, and two more (one more
            where a matrix was made of it).
        sizes: Sizes of the dimensions that the graph merges.
        is_turned: Whether the graph then swaps its last two dimensions.
    """

    value: Tensor
    sizes: tuple[int, ...]
    is_turned: bool = False

    @property
    def merged(self) -> list[int]:
        """Return the places of the dimensions."""
        return list(range(len(self.sizes)))


class _Products(NamedTuple):
    """The products of a run, with the dimensions that they keep apart.

    Attributes:
        values: What has run so far.
        known: The products among it that are kept apart.
    """

    values: Mapping[fx.Node, Any]
    known: dict[fx.Node, Any]

    def run(self, node: fx.Node) -> Tensor | None:
        """Run a product, or a view of one that keeps dimensions apart."""
        if node.target in _MERGES and node.all_input_nodes[0] in self.known:
            return _parted(self.known[node.all_input_nodes[0]], node)
        product = self._product(node)
        if not isinstance(product, _Apart):
            return product
        self.known[node] = product
        return product.value.reshape(-1, *product.value.shape[len(product.sizes) :])

    def _product(self, node: fx.Node) -> Tensor | _Apart | None:
        """Compute a product of values that are kept apart, None if it is none."""
        operands: Any = node.args
        target: Any = node.target
        if getattr(target, "__func__", None) is RowGroups.product:
            return self._grouped_product(target.__self__, *operands)
        if node.target is _aten.bmm.default:
            return _batched(*map(self._apart, operands))
        if node.target is _aten.mm.default:
            return self._matrix_product(*operands)
        if node.target is _aten.addmm.default and not node.kwargs:
            bias, left, right = operands
            product = self._matrix_product(left, right)
            if isinstance(product, _Apart):
                return product._replace(value=product.value + self.values[bias])
        return None

    def _grouped_product(
        self, rows: RowGroups, left: Any, right: Any, outer: int
    ) -> Tensor | None:
        """Multiply matrices, one product per group of what is summed over."""
        first, second = self._apart(left), self._apart(right)
        if first is None or second is None or not first.is_turned:
            return None
        sizes = first.sizes
        dims = [d for d in first.merged if math.prod(sizes[:d]) == outer]
        is_cut = bool(dims) and sizes[dims[-1]] % rows.size == 0
        if second.is_turned or second.sizes != sizes or not is_cut:
            return None
        groups = [rows.split(apart.value, dims[-1], 1) for apart in (first, second)]
        sums = [dim + 1 for dim in first.merged]
        return xla_compat.product(groups[0], groups[1], (sums, sums), [0])

    def _matrix_product(self, left: Any, right: Any) -> Tensor | _Apart | None:
        first, second = self._apart(left), self._apart(right)
        if first is None:
            return None
        if not first.is_turned:
            last = [len(first.sizes)]
            value = xla_compat.product(first.value, self.values[right], (last, [0]))
            return _Apart(value, first.sizes)
        if second is None or second.is_turned or second.sizes != first.sizes:
            return None
        sums = first.merged, second.merged
        return xla_compat.product(first.value, second.value, sums)

    def _apart(self, node: fx.Node) -> _Apart | None:
        """Return a factor as it was before the graph merged its first dimensions."""
        is_turned = is_transpose(node, self.values[node].dim())
        merge = node.all_input_nodes[0] if is_turned else node
        if merge.target not in _MERGES:
            return None
        origin = merge.all_input_nodes[0]
        known = self.known.get(origin)
        source = self.values[origin] if known is None else known.value
        merged: Tensor = self.values[merge]
        for count in range(2, source.dim()):
            sizes = tuple(source.shape[:count])
            if math.prod(sizes) == merged.shape[0]:
                value = source.reshape(*sizes, *merged.shape[1:])
                return _Apart(value, sizes, is_turned)
        return None


def _parted(product: _Apart, node: fx.Node) -> Tensor | None:
    """Return the view of a product, None if it does not keep what is apart."""
    shape = [int(size) for size in node.args[1]]  # type: ignore[arg-type, union-attr]
    if tuple(shape[: len(product.sizes)]) != product.sizes:
        return None
    return product.value.reshape(shape)


def _batched(left: _Apart | None, right: _Apart | None) -> _Apart | None:
    """Multiply matrices at each place of the dimensions that are kept apart."""
    if left is None or right is None or left.sizes != right.sizes:
        return None
    first = len(left.sizes)
    sums = (
        [first if left.is_turned else first + 1],
        [first + 1 if right.is_turned else first],
    )
    value = xla_compat.product(left.value, right.value, sums, left.merged)
    return _Apart(value, left.sizes)
