"""Follow the batch through a graph.

A value's batch has a *place*: the dimension that it is in, and the product of the sizes
that are merged into that dimension before it, see `Place`. Merged dimensions keep it:
rows and sequence in one dimension, or heads and rows.

Places show how a sum over the batch is best cut into groups. A wrong or missing place
does not change results: a sum may be cut anywhere.
"""

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from torch_xla_pp.compile.ops import permutation, views, wrapped
from torch_xla_pp.graph import ATTENTION, ATTENTION_BACKWARD

_aten = torch.ops.aten

REDUCTIONS = frozenset(
    {
        _aten.amax.default,
        _aten.amin.default,
        _aten.logsumexp.default,
        _aten.mean.dim,
        _aten.sum.dim_IntList,
        _aten.var.correction,
        _aten.var_mean.correction,
    }
)


class Place(NamedTuple):
    """The place of the batch in a value.

    Attributes:
        dim: The dimension that it is part of.
        outer: Product of the sizes that are merged into that dimension before it.
    """

    dim: int
    outer: int = 1


Places = dict[fx.Node, Place]


def batch_places(
    graph: fx.Graph,
    known: Mapping[fx.Node, Place],
    size: int,
    settled: Collection[fx.Node] = (),
) -> Places:
    """Find the place of the batch in the values of a graph.

    Args:
        graph: Its nodes have metadata of their values.
        known: The places in some placeholders; others have no batch.
        size: The number of groups that the batch is cut into.
        settled: Nodes for which `known` has the last word, whatever they compute.

    Returns:
        The places in the values that have a batch.
    """
    places: Places = dict(known)
    for node in graph.nodes:
        is_found = node.op == "call_function" and node not in settled
        if not is_found or not shape_of(node):
            continue
        place = _place(node, places)
        if place is not None and _has_groups(node, place, size):
            places[node] = place
    return places


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of a node's value; `()` also if it is not a tensor."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _place(node: fx.Node, places: Places) -> Place | None:
    """Return the place of the batch in what a node computes from its operands."""
    rule = _RULES.get(node.target)
    if rule is not None:
        return rule(node, places)
    source = node.all_input_nodes[:1]
    if node.target is operator.getitem and source:
        if source[0].target in (ATTENTION, ATTENTION_BACKWARD):
            return _attended(node, places)
        return next(_alike(node, source[0].all_input_nodes, places), None)
    return next(_alike(node, node.all_input_nodes, places), None)


def attention_dims(node: fx.Node) -> dict[fx.Node, tuple[int, int]]:
    """Return where the operands of attention have its batch and its heads.

    Args:
        node: The operation, or its gradients.
    """
    is_forward = node.target is ATTENTION
    turned = () if is_forward else (node.args[0], node.args[5])
    return {x: (0, 2) if x in turned else (0, 1) for x in node.all_input_nodes}


def _attended(node: fx.Node, places: Places) -> Place | None:
    """Find the place in a result of attention, if it is in the batch or the heads."""
    source, item = node.all_input_nodes[0], node.args[1]
    dims = (0, 2) if source.target is ATTENTION and item == 0 else (0, 1)
    for operand, own in attention_dims(source).items():
        place = places.get(operand)
        if place is not None and place.dim in own:
            return place._replace(dim=dims[own.index(place.dim)])
    return None


def _has_groups(node: fx.Node, place: Place, size: int) -> bool:
    shape = shape_of(node)
    is_dim = place.dim < len(shape)
    return is_dim and shape[place.dim] % (place.outer * size) == 0


def _alike(
    node: fx.Node, operands: Sequence[fx.Node], places: Places
) -> Iterator[Place]:
    """Take the places in operands whose dimension the result has, too."""
    shape = shape_of(node)
    for operand in operands:
        place, own = places.get(operand), shape_of(operand)
        if place is None:
            continue
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        dim = place.dim + (len(shape) - len(own) if is_pointwise else 0)
        if 0 <= dim < len(shape) and shape[dim] == own[place.dim]:
            yield place._replace(dim=dim)


def _reshaped(node: fx.Node, places: Places) -> Place | None:
    source = node.all_input_nodes[0]
    place, old, new = places.get(source), shape_of(source), shape_of(node)
    if place is None:
        return None
    before = math.prod(old[: place.dim]) * place.outer
    for dim, size in enumerate(new):
        start = math.prod(new[:dim])
        if size > 1 and before % start == 0 and start <= before < start * size:
            return Place(dim, before // start)
    return None


def _expanded(node: fx.Node, places: Places) -> Place | None:
    source = node.all_input_nodes[0]
    place = places.get(source)
    shift = len(shape_of(node)) - len(shape_of(source))
    return None if place is None else place._replace(dim=place.dim + shift)


def _permuted(node: fx.Node, places: Places) -> Place | None:
    source: Any = node.all_input_nodes[0]
    place, count = places.get(source), len(shape_of(source))
    if place is None:
        return None
    order = permutation(node, count)
    return place._replace(dim=order.index(place.dim))


def _reduced(node: fx.Node, places: Places) -> Place | None:
    source: Any = node.all_input_nodes[0]
    place, old = places.get(source), shape_of(source)
    if place is None or len(shape_of(node)) == len(old):
        return next(_alike(node, [source], places), None)
    dims = summed(node, len(old))
    if place.dim in dims:
        return None
    return place._replace(dim=place.dim - sum(dim < place.dim for dim in dims))


def summed(node: fx.Node, count: int) -> list[int]:
    """Return the dimensions that a reduction of a value of `count` goes over."""
    dims = node.args[1] if len(node.args) > 1 else None
    return wrapped(dims, count) if dims else list(range(count))  # type: ignore[arg-type]


def _selected(node: fx.Node, places: Places) -> Place | None:
    source: Any = node.all_input_nodes[0]
    place, count = places.get(source), len(shape_of(source))
    (dim,) = wrapped(node.args[1], count)  # type: ignore[arg-type]
    if place is None or place.dim == dim:
        return None
    return place._replace(dim=place.dim - (dim < place.dim))


def _unselected(node: fx.Node, places: Places) -> Place | None:
    place = places.get(node.all_input_nodes[0])
    (dim,) = wrapped(node.args[2], len(shape_of(node)))  # type: ignore[arg-type]
    return place and place._replace(dim=place.dim + (dim <= place.dim))


def _stacked(node: fx.Node, places: Places) -> Place | None:
    count = len(shape_of(node))
    (dim,) = wrapped(node.args[1] if len(node.args) > 1 else 0, count)  # type: ignore[arg-type]
    known = (places[n] for n in node.all_input_nodes if n in places)
    place = next(known, None)
    return place and place._replace(dim=place.dim + (dim <= place.dim))


def _multiplied(node: fx.Node, places: Places) -> Place | None:
    """Find the place in a product of matrices, or of stacks of them."""
    left, right = node.args[-2:]
    rows, columns = places.get(left), places.get(right)  # type: ignore[arg-type]
    last = len(shape_of(left)) - 1
    if rows is not None and rows.dim != last:
        return rows
    return columns if columns is not None and columns.dim != last - 1 else None


_RULES: dict[Any, Callable[[fx.Node, Places], Place | None]] = {
    **dict.fromkeys(views("view", "squeeze"), _reshaped),
    **dict.fromkeys(REDUCTIONS, _reduced),
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default), _multiplied),
    **dict.fromkeys((_aten.addmm.default, _aten.baddbmm.default), _multiplied),
    **dict.fromkeys(views("expand"), _expanded),
    **dict.fromkeys(views("permute"), _permuted),
    **dict.fromkeys(views("select"), _selected),
    _aten.select_backward.default: _unselected,
    _aten.stack.default: _stacked,
}
