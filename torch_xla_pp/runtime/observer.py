"""Who watches what a rank does in a step; nobody, unless a step is profiled."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.profiler import record_function

from torch_xla_pp import xla_compat
from torch_xla_pp.mesh import Tiling
from torch_xla_pp.runtime.torch_compat import is_profiling
from torch_xla_pp.schedule import Action
from torch_xla_pp.transport import Message

Marks = Mapping[str, Tensor]


class Observer(Protocol):
    """What is told of the actions of a rank, and of what goes through the host."""

    def action(
        self, action: Action, *, is_rest: bool = False
    ) -> contextlib.AbstractContextManager[Marks]:
        """Watch the block that enqueues an action, with the marks that it is given.

        Args:
            action: The action.
            is_rest: Whether this is a part of it that comes after the rest.
        """

    def sent(
        self,
        message: Message,
        values: Sequence[Tensor],
        there: Sequence[Tiling] | None = None,
    ) -> None:
        """Watch a message that is sent; `there` is how it is tiled on the peer."""

    def receiving(self, message: Message) -> contextlib.AbstractContextManager[None]:
        """Watch the block that waits for a message."""


class Nobody:
    """An observer that watches nothing."""

    def action(
        self, action: Action, *, is_rest: bool = False
    ) -> contextlib.AbstractContextManager[Marks]:
        """Give no marks."""
        return contextlib.nullcontext({})

    def sent(
        self,
        message: Message,
        values: Sequence[Tensor],
        there: Sequence[Tiling] | None = None,
    ) -> None:
        """Watch nothing."""

    def receiving(self, message: Message) -> contextlib.AbstractContextManager[None]:
        """Watch nothing."""
        return contextlib.nullcontext()


NOBODY = Nobody()


def shown_as(name: str) -> contextlib.AbstractContextManager[Any]:
    """Give the block a name in torch's and XLA's profilers, where they are on."""
    xlas = xla_compat.traced(name)
    if not is_profiling():
        return xlas
    both = contextlib.ExitStack()
    both.enter_context(xlas)
    both.enter_context(record_function(name))
    return both
