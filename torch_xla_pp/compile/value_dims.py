"""Which dimensions of values are those of parameters, and what is summed over them.

Where a matrix is split over devices, so is what is computed with it: the hidden width
of an MLP and the heads of attention are dimensions of weights. This pass follows them
through a joint graph, so that any way to split the parameters says how values are
split, and which results are sums over devices, without compiling anything.

Terms: a *label* names a dimension of an input or of a parameter. A dimension of a value
has *factors*, as a view may have put several dimensions into one: each is a size with
at most one label. Of several labels that meet in a sum or a product of elements the
first stays: these are the same dimension of the model.

What this pass does not know of an operation it takes to work element by element if the
shapes allow that, and else to make values without labels.
"""

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torch_xla_pp.compile.joint_graph import JointGraph
from torch_xla_pp.compile.names import index_of_tangent, is_tangent
from torch_xla_pp.compile.ops import VIEWS, permutation, wrapped

_aten = torch.ops.aten

Label = tuple[str, int]
"""Role of an input or a parameter in the joint graph, and which dimension of it."""


class DimFactor(NamedTuple):
    """A factor of a dimension.

    Attributes:
        size: Its size.
        label: What it is a dimension of, None if of nothing that is known.
    """

    size: int
    label: Label | None


Dims = tuple[tuple[DimFactor, ...], ...]

_SUMS = {_aten.mean.dim, _aten.sum.dim_IntList}
_REDUCTIONS = {*_SUMS, _aten.amax.default, _aten.amin.default}
_PRODUCTS = {_aten.addmm.default: 1, _aten.bmm.default: 0, _aten.mm.default: 0}


@dataclass(frozen=True, slots=True)
class LabelledSum:
    """A result that is summed over dimensions with labels.

    Args:
        node: The result, after all parts of it are added up.
        labels: The dimensions that are summed over.
    """

    node: fx.Node
    labels: tuple[Label, ...]


class ValueDims:
    """The dimensions of all values of a joint graph.

    Args:
        joint: The graph.
    """

    def __init__(self, joint: JointGraph) -> None:
        self._joint = joint
        self._dims: dict[fx.Node, Dims] = {}
        self._pending: dict[fx.Node, tuple[Label, ...]] = {}
        self._sums: dict[fx.Node, tuple[Label, ...]] = {}
        for node in joint.graph.graph.nodes:
            if node.op == "call_function":
                self._dims[node] = self._of_op(node)
                self._follow_sums(node)
        for node in joint.graph.graph.nodes:
            if node.op == "output":
                self._add_up(node.all_input_nodes)

    def labels(self, node: fx.Node) -> tuple[Label, ...]:
        """Return the labels of a value's dimensions, in their order."""
        factors = (factor for dim in self.of(node) for factor in dim)
        return tuple(dict.fromkeys(f.label for f in factors if f.label is not None))

    def sums(self) -> Iterator[LabelledSum]:
        """Yield what is summed over dimensions with labels; parts are added first."""
        for node, labels in self._sums.items():
            yield LabelledSum(node, labels)

    def of(self, node: fx.Node) -> Dims:
        """Return the factors of a value's dimensions."""
        if node not in self._dims:
            self._dims[node] = self._of_placeholder(node)
        return self._dims[node]

    def _of_placeholder(self, node: fx.Node) -> Dims:
        role = self._joint.roles.get(node)
        if role is not None and is_tangent(role):
            # A gradient is split as what it is of.
            return self.of(self._joint.outputs[index_of_tangent(role)])
        if role is None:
            return _whole(node)
        return tuple(
            (DimFactor(size, (role, dim)),) for dim, size in enumerate(_shape(node))
        )

    def _of_op(self, node: fx.Node) -> Dims:
        """Return the dimensions of what an operation makes."""
        shape, target = _shape(node), node.target
        read = [
            x for x in node.all_input_nodes if isinstance(x.meta.get("val"), Tensor)
        ]
        if target is operator.getitem:
            (source,) = node.all_input_nodes
            return _resized(self.of(source), shape)
        if not isinstance(node.meta.get("val"), Tensor):
            return self.of(read[0]) if read else ()
        if target in _PRODUCTS:
            return self._of_product(node)
        if target is _aten.embedding.default:
            table, places = read[0], read[-1]
            return (*self.of(places), self.of(table)[1])
        form = VIEWS.get(target)  # type: ignore[call-overload]
        if form is not None:
            return self._of_view(node, form, self.of(read[0]))
        if target in _REDUCTIONS:
            return _without(self.of(read[0]), _summed_dims(node), shape)
        if target is _aten.cat.default:
            return _resized(_first_known([self.of(x) for x in read], len(shape)), shape)
        return _elementwise([self.of(x) for x in read], shape)

    def _of_view(self, node: fx.Node, form: str, dims: Dims) -> Dims:
        shape = _shape(node)
        if form == "permute":
            return tuple(dims[d] for d in permutation(node, len(dims)))
        if form in ("view", "squeeze"):
            return _viewed_as(dims, shape)
        if form in ("same", "slice", "pieces"):
            return _resized(dims, shape)
        if form == "select":
            (gone,) = wrapped(node.args[1], len(dims))  # type: ignore[arg-type]
            return dims[:gone] + dims[gone + 1 :]
        return _elementwise([dims], shape)

    def _of_product(self, node: fx.Node) -> Dims:
        first, second = self._factors_of(node)
        found: Dims = (*first[:-1], second[-1])
        if node.target is _aten.addmm.default:
            bias = self.of(node.all_input_nodes[0])
            return _elementwise([found, bias], _shape(node))
        return found

    def _factors_of(self, node: fx.Node) -> tuple[Dims, Dims]:
        """Return the dimensions of both factors of a product of matrices."""
        skipped = _PRODUCTS[node.target]  # type: ignore[index]
        first, second = node.args[skipped : skipped + 2]
        return self.of(first), self.of(second)  # type: ignore[arg-type]

    def _follow_sums(self, node: fx.Node) -> None:
        """Note what is summed over, or pass on what its parts are summed over."""
        read = node.all_input_nodes
        waiting = [self._pending[x] for x in read if x in self._pending]
        is_view = node.target in VIEWS
        is_sum = node.target is _aten.add.Tensor and len(waiting) == len(read) == 2
        if waiting and (is_view or is_sum) and all(len(x.users) == 1 for x in read):
            for x in read:
                del self._pending[x]
            self._pending[node] = tuple(
                dict.fromkeys(x for own in waiting for x in own)
            )
            return
        self._add_up(read)
        if labels := self._summed_over(node):
            self._pending[node] = labels

    def _add_up(self, nodes: Iterable[fx.Node]) -> None:
        """Note that results are read as sums over all devices."""
        for node in nodes:
            if node in self._pending:
                self._sums[node] = self._pending.pop(node)

    def _summed_over(self, node: fx.Node) -> tuple[Label, ...]:
        """Return the labels of the dimensions that an operation sums over."""
        dims: Dims
        if node.target in _PRODUCTS:
            first, second = self._factors_of(node)
            dims = (first[-1], second[-2])
        elif node.target is _aten.embedding.default:
            dims = (self.of(node.all_input_nodes[0])[0],)
        elif node.target in _SUMS:
            source = self.of(node.all_input_nodes[0])
            dims = tuple(source[dim] for dim in _summed_dims(node))
        else:
            return ()
        labels = (factor.label for dim in dims for factor in dim)
        return tuple(dict.fromkeys(label for label in labels if label is not None))


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _whole(node: fx.Node) -> Dims:
    return _unlabelled(_shape(node))


def _unlabelled(shape: Sequence[int]) -> Dims:
    return tuple((DimFactor(size, None),) for size in shape)


def _size(dim: Iterable[DimFactor]) -> int:
    return prod(factor.size for factor in dim)


def first_label(dim: Iterable[DimFactor]) -> Label | None:
    """Return the label of the largest part of a dimension that has one."""
    return next((f.label for f in dim if f.label is not None), None)


def _resized(dims: Dims, shape: Sequence[int]) -> Dims:
    """Return dimensions of which some have other sizes, as pieces of a value have."""
    if len(dims) != len(shape):
        return _unlabelled(shape)
    return tuple(
        dim if _size(dim) == size else (DimFactor(size, first_label(dim)),)
        for dim, size in zip(dims, shape, strict=True)
    )


def _elementwise(operands: Sequence[Dims], shape: Sequence[int]) -> Dims:
    """Return the dimensions of what is computed element by element."""
    if any(len(dims) > len(shape) for dims in operands):
        return _unlabelled(shape)
    found = []
    for place, size in enumerate(shape, -len(shape)):
        own = [dims[place] for dims in operands if len(dims) >= -place]
        if any(_size(dim) not in (1, size) for dim in own):
            return _unlabelled(shape)
        known = [
            dim for dim in own if _size(dim) == size and first_label(dim) is not None
        ]
        found.append(known[0] if known else (DimFactor(size, None),))
    return tuple(found)


def _first_known(operands: Sequence[Dims], count: int) -> Dims:
    """Return for each dimension the first operand's that has a label."""
    alike = [dims for dims in operands if len(dims) == count]
    return tuple(
        next((d for d in own if first_label(d) is not None), own[0])
        for own in zip(*alike, strict=True)
    )


def _viewed_as(dims: Dims, shape: Sequence[int]) -> Dims:
    """Return the factors of a value's dimensions in those of a view of it."""
    left = [factor for dim in dims for factor in dim if factor.size != 1]
    found = []
    for size in shape:
        own, need = [], size
        while need > 1:
            if not left:
                return _unlabelled(shape)
            factor = left.pop(0)
            if factor.size > need:
                if factor.size % need:
                    return _unlabelled(shape)
                # Devices have the larger parts of what is split.
                left.insert(0, DimFactor(factor.size // need, None))
                factor = DimFactor(need, factor.label)
            if need % factor.size:
                return _unlabelled(shape)
            own.append(factor)
            need //= factor.size
        found.append(tuple(own) or (DimFactor(size, None),))
    return tuple(found)


def _summed_dims(node: fx.Node) -> list[int]:
    """Return the dimensions that a reduction sums over."""
    count = len(_shape(node.all_input_nodes[0]))
    dims: Any = node.args[1] if len(node.args) > 1 else None
    return wrapped(dims, count) if dims not in (None, []) else [*range(count)]


def _without(dims: Dims, summed: Collection[int], shape: Sequence[int]) -> Dims:
    """Return what a sum leaves; dimensions that it keeps have a size of one."""
    if len(shape) == len(dims):
        return _resized_where(dims, summed)
    return tuple(dim for place, dim in enumerate(dims) if place not in summed)


def _resized_where(dims: Dims, places: Collection[int]) -> Dims:
    return tuple(
        (DimFactor(1, None),) if place in places else dim
        for place, dim in enumerate(dims)
    )
