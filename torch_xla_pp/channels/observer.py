"""The observer of a rank's step, if the step is profiled."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from torch_xla_pp.mesh import Tiling
from torch_xla_pp.schedule import Action
from torch_xla_pp.transport import Message

Marks = Mapping[str, Tensor]


class Observer(Protocol):
    """An observer of a rank's actions, and of its messages through the host."""

    def action(
        self, action: Action, *, is_rest: bool = False
    ) -> contextlib.AbstractContextManager[Marks]:
        """Observe the block that enqueues an action, with the marks that it yields.

        Args:
            action: The action.
            is_rest: Whether this is a later part of an action that was observed before.
        """

    def sent(
        self,
        message: Message,
        values: Sequence[Tensor],
        there: Sequence[Tiling] | None = None,
    ) -> None:
        """Observe a message that is sent; `there` are its tilings on the peer."""

    def receiving(self, message: Message) -> contextlib.AbstractContextManager[None]:
        """Observe the block that waits for a message."""
