"""Messages of bytes between the ranks of a group, by keys.

Terms: a *message* is a header and *parts*, each sent straight from the buffer that
holds it. A *key* is any tuple of texts and numbers; messages match by (generation,
source, key) and, among equals, by order. User tags, stage messages and collectives have
keys that begin with different words.

Law: the receiver's process takes every message at once, whether or not the program
there asks for it yet. Hence a send never waits for the peer's program.
"""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_xla_pp.errors import TransportError
from torch_xla_pp.transport.inbox import Inbox, Key, Parcel, Ticket
from torch_xla_pp.transport.rendezvous import Rendezvous
from torch_xla_pp.transport.sockets import LEFT, Sockets

_CLOSE_S = 5.0

_logger = logging.getLogger(__name__)


class Wire:
    """Messages between the ranks of one group.

    Args:
        sockets: The connections of the group.
        rendezvous: The rendezvous of the group, whose errors end receives that wait.
    """

    def __init__(self, sockets: Sockets, rendezvous: Rendezvous) -> None:
        self._sockets = sockets
        self._rendezvous = rendezvous
        self._inbox = Inbox()
        sockets.on("data", self._arrived)
        sockets.on_gone(self._end)
        rendezvous.join(self)

    @property
    def rank(self) -> int:
        """Return the rank of this process in the group."""
        return self._sockets.rank

    def send(self, peer: int, key: Key, header: Any, parts: Sequence[Tensor]) -> None:
        """Send a message to `peer` and return at once.

        Args:
            peer: Rank in the group; one's own is allowed.
            key: The key by which the peer receives it.
            header: Any value that pickles.
            parts: Contiguous uint8 CPU tensors; not to be changed afterwards.

        Raises:
            TransportError: The peer has left or its connection is lost.
            Exception: A peer has reported a failure, see `Rendezvous.check`.
        """
        try:
            self.post(self._rendezvous.generation, peer, key, header, parts)
        except TransportError:
            self._rendezvous.check()
            raise

    def post(
        self,
        generation: int,
        peer: int,
        key: Key,
        header: Any,
        parts: Sequence[Tensor],
    ) -> None:
        """Send a message of a generation, as `send` does; any thread may call.

        Raises:
            TransportError: The peer has left or its connection is lost.
        """
        if peer == self.rank:
            self._inbox.deliver(generation, peer, key, Parcel(header, list(parts)))
            return
        try:
            self._sockets.send(peer, "data", (generation, key, header), parts)
        except TransportError as error:
            raise self._gone(peer, f"send {_name(key)}") from error

    def check_there(self, peer: int, key: Key) -> None:
        """Raise if `peer`, which a message is for, is known to be gone.

        Raises:
            TransportError: It has left or its connection is lost.
            Exception: A peer has reported a failure, see `Rendezvous.check`.
        """
        self._rendezvous.check()
        if self._inbox.closed(peer) is not None:
            raise self._gone(peer, f"send {_name(key)}")

    def notify(self, peer: int, key: Key) -> None:
        """Send an empty message, unless the peer is gone."""
        with contextlib.suppress(TransportError):
            self._sockets.send(peer, "data", (self._rendezvous.generation, key, None))

    def expect(self, peer: int, key: Key) -> Ticket:
        """Reserve the next message of `peer` under `key`, for `receive`."""
        return self._inbox.expect(self._rendezvous.generation, peer, key)

    def has_arrived(self, ticket: Ticket) -> bool:
        """Return whether `receive` would return at once."""
        return self._inbox.has(ticket)

    def receive(self, ticket: Ticket, timeout_s: float | None = None) -> Parcel:
        """Wait for a message and take it.

        Raises:
            TransportTimeout: It did not come within `timeout_s` seconds.
            TransportError: The peer has left or its connection is lost.
            Exception: A peer has reported a failure, see `Rendezvous.check`.
        """
        source = ticket.source
        self._rendezvous.wait_until(
            lambda limit_s: self._inbox.wait(ticket, limit_s),
            timeout_s,
            lambda: f"{self._rendezvous.title(source)}: recv {_name(ticket.key)}",
            # For a connected rank, the inbox reports its end, after its messages.
            lambda: [] if self._sockets.is_connected(source) else [source],
        )
        parcel = self._inbox.take(ticket)
        if parcel is None:
            self._rendezvous.check()
            raise self._gone(source, f"recv {_name(ticket.key)}")
        return parcel

    def report(self, generation: int, report: str, num_ended: int) -> None:
        """Do nothing: receives that wait check often."""

    def end_step(self, generation: int, num_ended: int) -> None:
        """Do nothing: likewise."""

    def end(self, generation: int) -> None:
        """Forget the messages of a generation that this rank leaves."""
        self._inbox.forget_until(generation)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Send what is still to be sent, and disconnect from every peer.

        Waits at most `timeout_s` seconds. What has arrived may still be received.
        """
        if not self._sockets.close(timeout_s):
            _logger.warning(
                "rank %d: not everything was sent within %g s: messages may be lost",
                self.rank,
                timeout_s,
            )
        for peer in range(self._sockets.size):
            if peer != self.rank:
                self._inbox.close(peer, LEFT)

    def _gone(self, peer: int, what: str) -> TransportError:
        """Return the error for a peer that is gone."""
        reason = self._inbox.closed(peer) or "the group was left"
        return TransportError(
            f"{what}: {self._rendezvous.title(peer)} is gone: {reason} (seen on rank "
            f"{self.rank}). Look for the first error of rank {peer}."
        )

    # On the thread of the connections.

    def _arrived(self, peer: int, content: Any, parts: list[Tensor]) -> None:
        generation, key, header = content
        self._inbox.deliver(generation, peer, key, Parcel(header, parts))

    def _end(self, peer: int, reason: str, is_lost: bool) -> None:
        self._inbox.close(peer, reason)


def _name(key: Key) -> str:
    return " ".join(str(word) for word in key)
