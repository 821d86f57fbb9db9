"""Follow the axes of a rank's mesh through a graph: which dimensions they split.

What is found says where a product may be computed part by part. It may differ from what
XLA chooses without harm to numbers. Where an axis cannot be followed the value is
*lost*: to say that it is whole there might make XLA gather it.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from torch_xla_pp.compile.group_sums.batch_dims import (
    REDUCTIONS,
    Place,
    Places,
    attention_dims,
    batch_places,
    shape_of,
)
from torch_xla_pp.graph import ATTENTION, ATTENTION_BACKWARD
from torch_xla_pp.mesh import Axis, Partition

_aten = torch.ops.aten

_PRODUCTS: Collection[Any] = {
    _aten.addmm.default,
    _aten.baddbmm.default,
    _aten.bmm.default,
    _aten.mm.default,
}
# Over whose devices' results XLA sums where they sum over what an axis splits.
_SUMS: Collection[Any] = {*REDUCTIONS, *_PRODUCTS, _aten.embedding.default}

AxisPlaces = Mapping[fx.Node, Mapping[Axis, Place]]


def axis_places(
    graph: fx.Graph,
    known: Mapping[fx.Node, Partition | None],
    size_of: Callable[[Axis], int],
) -> AxisPlaces:
    """Find what the axes of a mesh split in the values of a graph.

    Args:
        graph: Its nodes have metadata of their values.
        known: The partitions of placeholders, and of what has a layout of its own; None
            where it is lost.
        size_of: Returns over how many devices an axis splits a dimension.

    Returns:
        For each value where each axis is that splits it; lost ones are left out.
    """
    found = [axis for split in known.values() for axis in split or () if axis]
    lost = {node for node, split in known.items() if split is None}
    places: dict[Axis, Places] = {}
    all_lost = set(lost)
    for axis in dict.fromkeys(found):
        here = {n: Place(s.index(axis)) for n, s in known.items() if s and axis in s}
        places[axis] = batch_places(graph, here, size_of(axis), settled=known)
        all_lost.update(_lost(graph, places[axis], lost, known))
    if not places:
        all_lost.update(_lost(graph, {}, lost, known))
    return {
        node: {axis: here[node] for axis, here in places.items() if node in here}
        for node in graph.nodes
        if node not in all_lost
    }


def _lost(
    graph: fx.Graph,
    places: Mapping[fx.Node, Place],
    lost: Collection[fx.Node],
    settled: Collection[fx.Node],
) -> set[fx.Node]:
    """Return the values in which an axis may be, nobody knows where."""
    found = set(lost)
    for node in graph.nodes:
        if node.op != "call_function" or node in settled:
            continue
        operands = list(_operands(node))
        here = [operand for operand in operands if operand in places]
        if node in places:
            is_lost = found.issuperset(here) or not _agree(node, here, places)
        else:
            is_sum = node.target in _SUMS and _agree(node, here, places)
            is_lost = any(x in found for x in operands) or bool(here and not is_sum)
        is_op = isinstance(node.target, OpOverload) or node.target is operator.getitem
        if is_lost or not is_op:
            found.add(node)
    return found


def _operands(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the tensors that a node reads; of one of several results, all of these."""
    is_item = node.target is operator.getitem
    sources = node.all_input_nodes
    for operand in sources[0].all_input_nodes if is_item and sources else sources:
        if shape_of(operand):
            yield operand


def _agree(
    node: fx.Node, operands: list[fx.Node], places: Mapping[fx.Node, Place]
) -> bool:
    """Return whether an axis splits the same of all operands that it splits.

    If it does not, XLA has the choice which of them it moves.
    """
    if node.target in _PRODUCTS:
        left: Any = node.args[-2]
        last = len(shape_of(left)) - 1
        of_sum = {left: last, node.args[-1]: last - 1}
        parts = {
            "sum"
            if places[operand].dim == of_sum.get(operand)
            else "batch"
            if places[operand].dim < last - 1
            else operand
            for operand in operands
            if operand in of_sum
        }
        return len(parts) < 2
    source = node.all_input_nodes[0] if node.target is operator.getitem else node
    if source.target in (ATTENTION, ATTENTION_BACKWARD):
        own = attention_dims(source)
        roles = {
            own[x].index(places[x].dim) if places[x].dim in own[x] else None
            for x in operands
        }
        return len(roles) < 2 and None not in roles
    # Counted from the last dimension, as operands may have fewer than the result.
    dims = {
        (places[operand].dim - len(shape_of(operand)), places[operand].outer)
        for operand in operands
    }
    return len(dims) < 2
