"""Who watches what a rank does in a step, if it is profiled."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from torch_xla_pp.mesh import Tiling
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
