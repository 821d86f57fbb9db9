"""The structure of arguments and outputs, apart from their tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_xla_pp.text import type_text


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of tensor number `index`.

    Args:
        index: Its number.
        shape: Its shape, None for any.
        dtype: Its dtype, None for any.
    """

    index: int
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    def __repr__(self) -> str:
        return type_text(self.shape, self.dtype) or f"tensor {self.index}"


@dataclass(frozen=True, slots=True)
class Template:
    """A pytree with slots in place of its tensors.

    Args:
        spec: How the leaves are put together.
        leaves: A slot for each tensor; other leaves stand for themselves.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(
        cls, tree: Any, tensors: Sequence[Tensor] = ()
    ) -> tuple["Template", list[Tensor]]:
        """Split a pytree into a template and tensors; a repeated tensor has one slot.

        Args:
            tree: The pytree.
            tensors: Tensors that get the first slots, in this order.

        Returns:
            The template, and the tensor of each slot.
        """
        leaves, spec = pytree.tree_flatten(tree)
        found = list(tensors)
        slots = {id(value): Slot(index) for index, value in enumerate(found)}
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in slots:
                slots[id(leaf)] = Slot(len(found))
                found.append(leaf)
        marks = [slots[id(x)] if isinstance(x, Tensor) else x for x in leaves]
        return cls(spec, tuple(marks)), found

    @classmethod
    def of_arguments(
        cls, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> tuple["Template", list[Tensor]]:
        """Split arguments into a template with metadata and their tensors.

        Calls with equal metadata have equal templates: each tensor has a slot of its
        own, with shape and dtype, also one that is there twice.

        Returns:
            The template of a pair of `args` and `kwargs`, and the tensor of each slot.
        """
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        slots = (Slot(i, tuple(x.shape), x.dtype) for i, x in enumerate(found))
        marks = [next(slots) if isinstance(x, Tensor) else x for x in leaves]
        return cls(spec, tuple(marks)), found

    @property
    def slots(self) -> list[Slot]:
        """Return the slots by their numbers."""
        slots = {leaf.index: leaf for leaf in self.leaves if isinstance(leaf, Slot)}
        return [slots[index] for index in sorted(slots)]

    @property
    def num_slots(self) -> int:
        """Return the number of tensors."""
        return len(self.slots)

    @property
    def constants(self) -> list[Any]:
        """Return the leaves that are not tensors."""
        return [leaf for leaf in self.leaves if not isinstance(leaf, Slot)]

    def fill(self, values: Sequence[Any]) -> Any:
        """Return the pytree with a value in place of each slot."""
        leaves = [
            values[leaf.index] if isinstance(leaf, Slot) else leaf
            for leaf in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.spec)
