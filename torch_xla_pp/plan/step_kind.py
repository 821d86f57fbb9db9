"""The kinds of steps, each of which needs programs of its own."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_xla_pp.graph import Captured, Slot, Template


@dataclass(frozen=True)
class Arguments:
    """The arguments that a schedule passes in for a microbatch.

    Args:
        template: Positional and keyword arguments, with slots of known shapes and
            dtypes in place of tensors.
    """

    template: Template

    def __str__(self) -> str:
        args, kwargs = self.template.fill(self.template.slots)
        named = [f"{name}={value}" for name, value in kwargs.items()]
        return f"({', '.join([*map(str, args), *named])})"

    @classmethod
    def of(
        cls, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> tuple["Arguments", list[Tensor]]:
        """Return a description of arguments, and the tensors among them."""
        template, tensors = Template.of_arguments(args, kwargs)
        return cls(template), tensors

    def tensors_of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Tensor] | None:
        """Return the tensors of such arguments, None if these are others."""
        if not kwargs and self._looks is not None:
            # The usual case; a template is made in ten times the time.
            found = [x for x in args if isinstance(x, Tensor)]
            looks = tuple((x.shape, x.dtype) for x in found)
            return found if len(found) == len(args) and looks == self._looks else None
        arguments, tensors = Arguments.of(args, kwargs)
        return tensors if arguments == self else None

    @functools.cached_property
    def _looks(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...] | None:
        """Return shapes and dtypes, None if there are others than tensors in a row."""
        args, kwargs = self.template.fill(self.template.slots)
        if kwargs or not all(isinstance(x, Slot) for x in args):
            return None
        return tuple((slot.shape, slot.dtype) for slot in args)

    def fill(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return such arguments, with `tensors` in place."""
        args, kwargs = self.template.fill(tensors)
        return args, kwargs


class Mode(NamedTuple):
    """The state besides its inputs that a module's forward depends on.

    Attributes:
        state: Number of the Python values that it reads, see `Captured`: training
            mode, hooks, numbers, `requires_grad` and more.
        autocast: The dtype of autocast, None where it is off.
    """

    state: int
    autocast: torch.dtype | None

    @classmethod
    def of(cls, captured: Captured) -> "Mode":
        """Return the present mode of a module."""
        return cls(captured.number(), autocast_dtype())


def autocast_dtype() -> torch.dtype | None:
    """Return the dtype of autocast, None where it is off."""
    is_on = torch.is_autocast_enabled("xla")
    return torch.get_autocast_dtype("xla") if is_on else None


class KindNumbers:
    """The numbers that the first stage gives to the kinds of a schedule's steps."""

    def __init__(self) -> None:
        self._known: list[Any] = []

    def number(self, kind: Any) -> int:
        """Return the number of a kind, a new one if none like it came before."""
        if kind not in self._known:
            self._known.append(kind)
        return self._known.index(kind)


def random_seed(initial: int, step: int, number: int) -> int:
    """Return a seed of 64 bits for one microbatch.

    Args:
        initial: The seed of the program.
        step: Number of the step.
        number: Number of the microbatch among those of all replicas.
    """
    digest = hashlib.blake2b(repr((initial, step, number)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big")
