"""The results of torch.distributed's asynchronous calls for XLA tensors."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from torch_xla_pp.transport.inbox import Parcel, Ticket
from torch_xla_pp.transport.wire import Wire


class DoneWork(dist.Work):
    """An operation that ended before its call returned."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Do nothing: there is nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Return True: the operation ended before this object was made."""
        return True


class ReceiveWork(dist.Work):
    """An operation whose tensors are filled when it is waited for.

    Args:
        wire: The wire of the messages.
        tickets: The messages that the operation needs.
        finish: Called once with all parcels, in the order of the tickets.
    """

    def __init__(
        self,
        wire: Wire,
        tickets: Sequence[Ticket],
        finish: Callable[[list[Parcel]], None],
    ) -> None:
        super().__init__()
        self._wire = wire
        self._missing = list(tickets)
        self._parcels: list[Parcel] = []
        self._finish: Callable[[list[Parcel]], None] | None = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the messages and fill the tensors.

        Args:
            timeout: Limit for each message; zero stands for the group's limit.

        Raises:
            TransportTimeout: A message did not come in time. Waiting may be repeated.
            TransportError: A peer is gone, or the tensors do not fit.
            Exception: A peer has reported a failure, see `Rendezvous.check`.
        """
        timeout_s = timeout.total_seconds() or None
        while self._missing:
            self._parcels.append(self._wire.receive(self._missing[0], timeout_s))
            del self._missing[0]
        if self._finish is not None:
            self._finish(self._parcels)
            self._finish = None
            self._parcels = []
        return True

    def is_completed(self) -> bool:
        """Return whether the tensors are filled; fills them if all has arrived."""
        if not all(self._wire.has_arrived(ticket) for ticket in self._missing):
            return False
        return self.wait()
