"""Digests of the operations of a traced model, to compare models by.

Operations of one kind on operands of equal names, with equal arguments and parameters
of equal shapes, have equal digests. Sizes are left out, as they may be those of a
batch; numbers of dimensions are not.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from torch_xla_pp.graph.ties import original_name


def digest_ops(graph: fx.Graph, ops: Iterable[fx.Node]) -> dict[str, str]:
    """Return the name of each operation → a text that is equal for equal ones.

    Args:
        graph: The traced graph.
        ops: The operations, after `normalize` and without marks. The model's results
            count as one more, `output`.
    """
    (output,) = graph.find_nodes(op="output")
    return {op.name: _digest(_parts(op)) for op in [*ops, output]}


def describe_op(op: fx.Node) -> str:
    """Return the text of an operation, from which its digest is made."""
    kind, value, *arguments = _parts(op)
    return f"{kind}({', '.join(map(str, arguments))}){value}"


def _digest(parts: list[Any]) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=4).hexdigest()


def _parts(op: fx.Node) -> list[Any]:
    return [_kind(op.target), _form(op.meta.get("val")), *_arguments(op)]


def _kind(target: str | Callable[..., Any]) -> str:
    """Return the name of the function that an operation calls, without an address."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


def _form(value: Any) -> str:
    """Return types and numbers of dimensions of a result."""
    tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
    return "".join(f" -> {_dtype(x)} of {x.dim()} dimensions" for x in tensors)


def _arguments(op: fx.Node) -> Iterator[str]:
    schema = getattr(op.target, "_schema", None)
    names = [x.name for x in schema.arguments] if schema is not None else []
    names += [""] * (len(op.args) - len(names))
    for name, value in [*zip(names, op.args, strict=False), *op.kwargs.items()]:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, fx.Node):
                yield _operand(leaf)
            elif type(leaf) is int:
                # Other whole numbers may be sizes of a batch.
                if leaf < 0 or name.startswith("dim"):
                    yield f"{name}={leaf}"
            elif leaf is not None and not isinstance(leaf, torch.device):
                yield f"{name}={leaf}"


def _operand(node: fx.Node) -> str:
    """Return a value's name, for a parameter with its shape."""
    if node.op != "get_attr":
        return str(node.name)
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if not isinstance(value, Tensor):
        return type(value).__name__
    name = original_name(str(node.target))
    return f"{name} {_dtype(value)}{list(value.shape)}"


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
