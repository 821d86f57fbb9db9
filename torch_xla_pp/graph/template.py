"""The structure of arguments and outputs, apart from their tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class Slot:
    """Stand for the tensor number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Template:
    """Hold a pytree with slots in place of its tensors; equal tensors share one.

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
        """Take a pytree apart.

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

    @property
    def num_slots(self) -> int:
        """Return the number of tensors."""
        slots = {leaf for leaf in self.leaves if isinstance(leaf, Slot)}
        return len(slots)

    @property
    def constants(self) -> list[Any]:
        """Return the leaves that are no tensors."""
        return [leaf for leaf in self.leaves if not isinstance(leaf, Slot)]

    def fill(self, values: Sequence[Any]) -> Any:
        """Return the pytree with a value in place of each slot."""
        leaves = [
            values[leaf.index] if isinstance(leaf, Slot) else leaf
            for leaf in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.spec)
