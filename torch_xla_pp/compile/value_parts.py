"""What to keep of a value where only views of it are read later.

Terms: a *part* is a view that is smaller than what it is a view of, its *whole*; views
that are not smaller, such as transposed values, stand for their operand. Keeping parts
in place of a whole takes copies, so it is done only if they are fewer bytes together:
two thirds of a product for queries, keys and values are, all three are not.
"""

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from torch_xla_pp.compile.ops import VIEWS


def bytes_of_value(value: Any) -> int:
    """Return the bytes of a tensor, or of several; 0 for what is none."""
    tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors)


def kept_for(node: fx.Node) -> fx.Node:
    """Return the value that a view stands for: its operand, if that is no larger."""
    operand = _operand(node)
    while operand is not None and _bytes(operand) <= _bytes(node):
        node, operand = operand, _operand(operand)
    return node


def whole_of(part: fx.Node) -> fx.Node | None:
    """Return what a part is of, None for a value that is no part."""
    operand = _operand(part)
    return None if operand is None else kept_for(operand)


def root_of(node: fx.Node) -> fx.Node:
    """Return the value that a view is of, be it smaller or not."""
    operand = _operand(node)
    while operand is not None:
        node, operand = operand, _operand(operand)
    return node


def fewest_bytes(read: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the values to keep for some: themselves, or what they are parts of.

    Args:
        read: Values that are read later, among them views.
    """
    needed = {kept_for(node) for node in read}
    parts: dict[fx.Node, set[fx.Node]] = {}
    for node in needed:
        while (whole := whole_of(node)) is not None:
            parts.setdefault(whole, set()).add(node)
            node = whole

    def kept(node: fx.Node) -> set[fx.Node]:
        if node in needed:
            return {node}
        found = {x for part in parts[node] for x in kept(part)}
        return found if sum(map(_bytes, found)) < _bytes(node) else {node}

    wholes = {root_of(node) for node in needed}
    return {node for whole in wholes for node in kept(kept_for(whole))}


def _operand(node: fx.Node) -> fx.Node | None:
    """Return the operand of a view, None for other values."""
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node.all_input_nodes[0] if node.target in VIEWS else None


def _bytes(node: fx.Node) -> int:
    return bytes_of_value(node.meta.get("val"))
