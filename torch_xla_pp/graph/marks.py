"""Stage marks by data dependency.

`pipeline_yield` marks the end of a stage anywhere in a model's forward. While a model
is exported it leaves an operator in the graph, which `prepare` takes out again;
otherwise it does nothing at all.

Source: JaxPP, https://arxiv.org/abs/2412.14374, section 3.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

_NAME = "torch_xla_pp::pipeline_yield"

torch.library.define(_NAME, "(Tensor[] values, str name) -> Tensor[]")


def _copy(values: Sequence[Tensor], name: str) -> list[Tensor]:
    """Return copies: an operator must not return an alias of its operands."""
    return [value.clone() for value in values]


def _fake(values: Sequence[Tensor], name: str) -> list[Tensor]:
    return [torch.empty_like(value) for value in values]


def _batched(
    info: Any, in_dims: tuple[Any, ...], values: Sequence[Tensor], name: str
) -> tuple[list[Tensor], list[Any]]:
    return YIELD(values, name), list(in_dims[0])


def _backward(context: Any, grads: Sequence[Any]) -> tuple[list[Any], None]:
    return list(grads), None


torch.library.impl(_NAME, "CompositeExplicitAutograd", _copy)
torch.library.register_fake(_NAME, _fake)
torch.library.register_vmap(_NAME, _batched)
torch.library.register_autograd(_NAME, _backward)

YIELD = torch.ops.torch_xla_pp.pipeline_yield.default

# A yield with unused results must stay in the graph, to be refused.
fx.node.has_side_effect(YIELD)


def pipeline_yield(*values: Any, name: str | None = None) -> Any:
    """Mark that `values` are the end of a stage, and return them.

    A stage holds what its yielded values depend on and no earlier stage holds. Later
    operations use the returned values. Yields that do not depend on each other make
    stages that run at the same time; what the model's outputs depend on beyond all
    yields is the last stage. Outside of `pipeline` this is the identity.

    Work that feeds no yield goes with its operands: into the latest stage that
    makes one of them, the last stage if one of them was yielded. Work on inputs and
    parameters alone goes to the first stage that uses it. Parameters and buffers go
    to each stage that uses them.

    Args:
        values: Tensors, or any pytrees of them.
        name: The stage's name, once per model; the default is made of its index.

    Returns:
        The single value as it is, or a tuple of several ones.

    Raises:
        ValueError: There is no tensor among the values.

    Example:
        >>> def forward(self, x):
        ...     h = pipeline_yield(self.trunk(x))
        ...     left = pipeline_yield(self.left(h))
        ...     right = pipeline_yield(self.right(h))
        ...     return self.head(left + right)
    """
    leaves, spec = pytree.tree_flatten(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise ValueError(
            "pipeline_yield: expected at least one tensor, got none. Pass the values "
            "that the stage ends with."
        )
    if torch.compiler.is_exporting():
        marked = iter(YIELD(tensors, name or ""))
        leaves = [next(marked) if isinstance(x, Tensor) else x for x in leaves]
        values = pytree.tree_unflatten(leaves, spec)
    return values[0] if len(values) == 1 else values
