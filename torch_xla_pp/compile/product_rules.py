"""Rules for `shard` and for products of matrices, see `lowering`.

`Constraints` is for ranks that split values over their devices, as axis rules say.
Besides `shard`, it computes products of matrices in another way than torch_xla does.
PyTorch merges dimensions before a product: batch and heads in attention, batch and
sequence in a linear layer. If the second of them is split over devices, the merged
dimension is split in a way that XLA has no sharding for, and every device gathers all
of it. Here such dimensions are kept apart.

`LibraryProducts` is for ranks of one device: products are calls of a library, for which
a transposed matrix is passed as it was stored before. With `Constraints` they are such
calls on each device's parts where it is known what these are, see `sharded_products`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torch_xla_pp import cpu, xla_compat
from torch_xla_pp.compile.group_sums.row_groups import RowGroups
from torch_xla_pp.compile.mesh_parts import ValueParts
from torch_xla_pp.compile.ops import is_transpose, views
from torch_xla_pp.compile.sharded_products import (
    Factor,
    ProductCall,
    ShardedProducts,
)
from torch_xla_pp.graph import SHARD, axes_of
from torch_xla_pp.mesh import LogicalAxes, Partition

_aten = torch.ops.aten
_MERGES = views("view")
_PRODUCTS = (_aten.mm.default, _aten.bmm.default)
_BIASED = (_aten.mm.default, _aten.addmm.default)


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryProducts:
    """The rule by which a library multiplies matrices.

    A bias is added by the same call, and so is what the sum is added to, such as the
    input of a layer. A product without a bias goes into the memory of what it is added
    to: so a backward adds up gradients of weights, whose sums are donated to it.

    Args:
        multiply: Takes two matrices, or batches of them, as they are stored and whether
            each is transposed; returns None for what it cannot multiply.
        multiply_biased: Likewise, with a bias of the product's columns before them, and
            what else is added behind them.
        add_product: Likewise, with a value before them to which it adds the product.
    """

    multiply: cpu.Product
    multiply_biased: cpu.BiasedProduct
    add_product: cpu.ProductSum

    def __call__(
        self, node: fx.Node, values: Mapping[fx.Node, Any], _: object, /
    ) -> Tensor | None:
        """Run `mm`, `bmm`, `addmm`, and `add` of a product and an input or a bias."""
        if node.target in _PRODUCTS:
            return self.multiply(*_Factors.of(node, values))
        if node.target is _aten.addmm.default and not node.kwargs:
            bias: Any = node.args[0]
            factors = _Factors.of(node, values)
            biased = self.multiply_biased(values[bias], *factors, None)
            if biased is not None:
                return biased
            product = self.multiply(*factors)
            return None if product is None else product + values[bias]
        if node.target is _aten.add.Tensor and not node.kwargs:
            first, second = node.args
            if isinstance(first, fx.Node) and isinstance(second, fx.Node):
                return self._added(first, second, values)
        return None

    def _added(
        self, first: fx.Node, second: fx.Node, values: Mapping[fx.Node, Any]
    ) -> Tensor | None:
        """Add a product to a value, or a bias to a product, or both."""
        biased = self._biased(first, second, values)
        if biased is not None:
            return biased
        added = self._sum(first, second, values)
        return self._sum(second, first, values) if added is None else added

    def _sum(
        self, total: fx.Node, term: fx.Node, values: Mapping[fx.Node, Any]
    ) -> Tensor | None:
        """Add a product, with its bias if it has one, to a value of its shape."""
        if total is term or values[total].shape != values[term].shape:
            return None
        bias: Any = None
        product, is_turned = _stored(term, values[term].dim())
        if not is_turned:
            product, bias = _linear(product)
        kinds = _PRODUCTS if bias is None else _BIASED
        if product.target not in kinds or not _is_read_once(term, product):
            return None
        factors = _Factors.of(product, values)
        if bias is not None:
            return self.multiply_biased(values[bias], *factors, values[total])
        return self.add_product(
            values[total], *(factors.turned if is_turned else factors)
        )

    def _biased(
        self, term: fx.Node, bias: fx.Node, values: Mapping[fx.Node, Any]
    ) -> Tensor | None:
        """Add a bias to a product whose rows may have been put into more dimensions."""
        product = _unmerged(term)
        if product.target is not _aten.mm.default or not _is_read_once(term, product):
            return None
        shape = values[term].shape
        if values[bias].shape != shape[-1:]:
            return None
        factors = _Factors.of(product, values)
        found = self.multiply_biased(values[bias], *factors, None)
        return None if found is None else found.reshape(shape)


class _Factors(NamedTuple):
    """The factors of a product as they are stored, and whether each is transposed."""

    left: Tensor
    right: Tensor
    is_left_turned: bool
    is_right_turned: bool

    @classmethod
    def of(cls, node: fx.Node, values: Mapping[fx.Node, Any]) -> "_Factors":
        """Return the factors of a node, its last two operands."""
        count = values[node.args[-1]].dim()  # type: ignore[index]
        (left, is_left_turned), (right, is_right_turned) = (
            _stored(factor, count)  # type: ignore[arg-type]
            for factor in node.args[-2:]
        )
        return cls(values[left], values[right], is_left_turned, is_right_turned)

    @property
    def turned(self) -> "_Factors":
        """Return the factors of the transposed product."""
        return _Factors(
            self.right, self.left, not self.is_right_turned, not self.is_left_turned
        )


def is_product(node: fx.Node) -> bool:
    """Return whether a result of a traced graph is a product, or one transposed.

    Nothing else reads it, so its sum with another value may be in the memory of that.
    """
    product, _ = _stored(node, node.meta["val"].dim())
    return product.target in _PRODUCTS and _is_read_once(node, product)


def _unmerged(node: fx.Node) -> fx.Node:
    """Return a value before its dimensions were merged or split."""
    while node.target in _MERGES:
        node = node.all_input_nodes[0]
    return node


def _linear(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return the product that a value is before it gets a bias, and the bias."""
    last: Any = _unmerged(node)
    if last.target is _aten.addmm.default and not last.kwargs:
        return last, last.args[0]
    if last.target is _aten.add.Tensor and not last.kwargs:
        product, bias = last.args
        if isinstance(product, fx.Node) and isinstance(bias, fx.Node):
            return _unmerged(product), bias
    return last, None


def _is_read_once(node: fx.Node, source: fx.Node) -> bool:
    """Return whether `source` is read for `node` alone, and `node` once."""
    while len(node.users) == 1:
        if node is source:
            return True
        node = node.all_input_nodes[0]
    return False


def _stored(node: fx.Node, count: int) -> tuple[fx.Node, bool]:
    """Return matrices as they were before they were transposed, and whether they were.

    Args:
        node: The matrices.
        count: How many dimensions they have: 3 if they are a batch.
    """
    is_turned = False
    while is_transpose(node, count):
        node = node.all_input_nodes[0]
        is_turned = not is_turned
    return node, is_turned


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraints:
    """The rule by which values are sharded as axis rules say.

    Args:
        layout: Takes the axes that `shard` was called with; returns their sharding,
            None to leave it to XLA.
        products: How products run on each device's parts, None for XLA's products.
    """

    layout: Callable[[LogicalAxes], xla_compat.OpSharding | None]
    products: ShardedProducts | None = None

    def __call__(
        self, node: fx.Node, values: Mapping[fx.Node, Any], notes: dict[fx.Node, Any], /
    ) -> Tensor | None:
        """Run `shard`, products, and views of products that are kept apart."""
        if node.target is SHARD:
            value: Any = node.args[0]
            axes = axes_of(node.args[1])  # type: ignore[arg-type]
            sharding = self.layout(axes)
            if sharding is None:
                return None
            return xla_compat.constrain(values[value], sharding)
        split = None if self.products is None else self._split(node, values, notes)
        return _Products(values, notes, split).run(node)

    def _split(
        self, node: fx.Node, values: Mapping[fx.Node, Any], notes: dict[fx.Node, Any]
    ) -> "_Split":
        assert self.products is not None
        parts = ValueParts.of_run(self.products.mesh, node, values, notes)
        return _Split(self.products, parts)


class _Split(NamedTuple):
    """The products of a run on each device's parts.

    Attributes:
        products: How they run.
        parts: What the mesh's axes split in the values of the run.
    """

    products: ShardedProducts
    parts: ValueParts


class _Apart(NamedTuple):
    """A value whose first dimensions are merged in the graph, but not here.

    Attributes:
        value: It has `sizes` in place of the merged dimension, and two more (one more
            where a matrix was made of it).
        sizes: Sizes of the dimensions that the graph merges.
        is_turned: Whether the graph then swaps its last two dimensions.
        partition: Which axes of the mesh split the value, None if that is not known.
    """

    value: Tensor
    sizes: tuple[int, ...]
    is_turned: bool = False
    partition: Partition | None = None

    @property
    def factor(self) -> Factor:
        """Return the value as a factor of a product."""
        return Factor(self.value, self.partition)

    @property
    def merged(self) -> list[int]:
        """Return the places of the dimensions."""
        return list(range(len(self.sizes)))


class _Products(NamedTuple):
    """The products of a run, whose dimensions are kept apart.

    Attributes:
        values: What has run so far.
        known: The products among these whose dimensions are kept apart.
        split: The products on each device's parts, None for XLA's.
    """

    values: Mapping[fx.Node, Any]
    known: dict[fx.Node, Any]
    split: _Split | None = None

    def run(self, node: fx.Node) -> Tensor | None:
        """Run a product, a sum of one, or a view of one that keeps dimensions apart."""
        if node.target in _MERGES and node.all_input_nodes[0] in self.known:
            return _parted(self.known[node.all_input_nodes[0]], node)
        if node.target is _aten.add.Tensor:
            if self.split is None or node.kwargs:
                return None
            return self._sum(node, self.split)
        product = self._product(node)
        if not isinstance(product, _Apart):
            return product
        self.known[node] = product
        return product.value.reshape(-1, *product.value.shape[len(product.sizes) :])

    def _sum(self, node: fx.Node, split: _Split) -> Tensor | None:
        """Add a product to an input, or a bias to a product; None for other sums."""
        first, second = node.args
        if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
            return None
        found = self._added(first, second, split)
        return self._biased(first, second, split) if found is None else found

    def _added(self, total: fx.Node, term: fx.Node, split: _Split) -> Tensor | None:
        if total.op != "placeholder":
            return None
        product, is_turned = _stored(term, self.values[term].dim())
        if product.target is _aten.addmm.default or not _is_read_once(term, product):
            return None
        call = self._call(product)
        if not isinstance(call, ProductCall):
            return None
        # Sums of gradients are inputs that no pass knows the shape of.
        value = self.values[total]
        (partition,) = split.parts.mesh.partitions_of([value])
        call = call.turned if is_turned else call
        return split.products.product_sum(Factor(value, partition), call)

    def _biased(self, term: fx.Node, bias: fx.Node, split: _Split) -> Tensor | None:
        """Add a bias to a product whose rows may have been put into more dimensions."""
        product = _unmerged(term)
        if product.target is not _aten.mm.default or not _is_read_once(term, product):
            return None
        call, shape = self._call(product), self.values[term].shape
        if call is None or self.values[bias].shape != shape[-1:]:
            return None
        call = call.call if isinstance(call, _ApartCall) else call
        found = split.products.biased_product(self._factor(bias), call)
        return None if found is None else found.reshape(shape)

    def _product(self, node: fx.Node) -> Tensor | _Apart | None:
        """Compute a product of values that are kept apart, None if it is none."""
        if node.target is _aten.addmm.default and not node.kwargs:
            bias: Any = node.args[0]
            return self._computed(self._call(node), self._factor(bias))
        return self._computed(self._call(node))

    def _computed(
        self, call: "ProductCall | _ApartCall | None", bias: Factor | None = None
    ) -> Tensor | _Apart | None:
        """Multiply, and add a bias."""
        if call is None:
            return None
        if isinstance(call, _ApartCall):
            value = self._multiply(call.call, bias)
            return None if value is None else _Apart(value, call.sizes)
        return self._multiply(call, bias)

    def _multiply(self, call: ProductCall, bias: Factor | None) -> Tensor | None:
        """Multiply each device's parts where these are known, else as XLA does.

        What the graph has as it is may be left to torch_xla.
        """
        if self.split is not None:
            products = self.split.products
            biased = None if bias is None else products.biased_product(bias, call)
            if biased is not None:
                return biased
            found = products.product(call)
            if found is not None:
                return found if bias is None else found + bias.value
        if call.is_plain:
            return None
        left, right, sums, batch, _ = call
        found = xla_compat.product(left.value, right.value, sums, batch)
        return found if bias is None else found + bias.value

    def _call(self, node: fx.Node) -> "ProductCall | _ApartCall | None":
        """Return a product of values that are kept apart, None if it is none."""
        operands: Any = node.args
        target: Any = node.target
        if getattr(target, "__func__", None) is RowGroups.product:
            return self._grouped_product(target.__self__, *operands)
        if target is _aten.bmm.default:
            found = self._batched(*map(self._apart, operands))
            return self._plain_product(*operands) if found is None else found
        if target is _aten.mm.default:
            return self._matrix_product(*operands)
        if target is _aten.addmm.default and not node.kwargs:
            return self._matrix_product(*operands[1:])
        return None

    def _plain_product(self, left: fx.Node, right: fx.Node) -> ProductCall | None:
        """Multiply matrices as they are stored, None for torch_xla's product."""
        if self.split is None:
            return None
        count = self.values[left].dim()
        first, is_left_turned = self._stored(left)
        second, is_right_turned = self._stored(right)
        sums = (
            [count - 2 if is_left_turned else count - 1],
            [count - 1 if is_right_turned else count - 2],
        )
        return ProductCall(first, second, sums, range(count - 2), is_plain=True)

    def _stored(self, node: fx.Node) -> tuple[Factor, bool]:
        """Return a matrix as it was before it was transposed, and whether it was."""
        stored, is_turned = _stored(node, self.values[node].dim())
        return self._factor(stored), is_turned

    def _factor(self, node: fx.Node) -> Factor:
        partition = None if self.split is None else self.split.parts.partition(node)
        return Factor(self.values[node], partition)

    def _grouped_product(
        self, rows: RowGroups, left: Any, right: Any, outer: int
    ) -> ProductCall | None:
        """Multiply matrices, one product per group of what is summed over."""
        first, second = self._apart(left), self._apart(right)
        if first is None or second is None or not first.is_turned:
            return None
        sizes = first.sizes
        dims = [d for d in first.merged if math.prod(sizes[:d]) == outer]
        is_cut = bool(dims) and sizes[dims[-1]] % rows.size == 0
        if second.is_turned or second.sizes != sizes or not is_cut:
            return None
        groups = [_groups(rows, apart, dims[-1]) for apart in (first, second)]
        sums = [dim + 1 for dim in first.merged]
        return ProductCall(groups[0], groups[1], (sums, sums), [0])

    def _matrix_product(
        self, left: Any, right: Any
    ) -> "ProductCall | _ApartCall | None":
        first, second = self._apart(left), self._apart(right)
        if first is None:
            return self._plain_product(left, right)
        if not first.is_turned:
            last = [len(first.sizes)]
            factor, is_turned = self._stored(right)
            if self.split is None or factor.partition is None:
                factor, is_turned = Factor(self.values[right], None), False
            sums = (last, [1 if is_turned else 0])
            return _ApartCall(ProductCall(first.factor, factor, sums), first.sizes)
        if second is None or second.is_turned or second.sizes != first.sizes:
            return self._plain_product(left, right)
        sums = first.merged, second.merged
        return ProductCall(first.factor, second.factor, sums)

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
                split = self.split
                partition = split and split.parts.partition(merge, sizes, value.dim())
                return _Apart(value, sizes, is_turned, partition)
        return None

    def _batched(
        self, left: _Apart | None, right: _Apart | None
    ) -> "_ApartCall | None":
        """Multiply matrices at each place of the dimensions that are kept apart."""
        if left is None or right is None or left.sizes != right.sizes:
            return None
        first = len(left.sizes)
        sums = (
            [first if left.is_turned else first + 1],
            [first + 1 if right.is_turned else first],
        )
        call = ProductCall(left.factor, right.factor, sums, left.merged)
        return _ApartCall(call, left.sizes)


class _ApartCall(NamedTuple):
    """A product whose first dimensions are merged in the graph, but not here.

    Attributes:
        call: The product.
        sizes: Sizes of the dimensions that the graph merges.
    """

    call: ProductCall
    sizes: tuple[int, ...]


def _parted(product: _Apart, node: fx.Node) -> Tensor | None:
    """Return the view of a product, None if it merges dimensions that are apart."""
    shape = [int(size) for size in node.args[1]]  # type: ignore[arg-type, union-attr]
    if tuple(shape[: len(product.sizes)]) != product.sizes:
        return None
    return product.value.reshape(shape)


def _groups(rows: RowGroups, apart: _Apart, dim: int) -> Factor:
    """Return a factor with the groups of its rows in a new first dimension."""
    value, split = rows.split(apart.value, dim, 1), apart.partition
    if split is None or rows.size == 1:
        return Factor(value, split and (None, *split))
    return Factor(value, (split[dim], *split[:dim], None, *split[dim + 1 :]))
