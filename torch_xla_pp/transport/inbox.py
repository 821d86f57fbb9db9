"""Messages that have arrived, and their order."""

import threading
from collections import Counter
from typing import Any, NamedTuple

from torch import Tensor

Key = tuple[str | int, ...]


class Parcel(NamedTuple):
    """One message: a description that pickles, and bytes as uint8 tensors."""

    header: Any
    parts: list[Tensor]


class Ticket(NamedTuple):
    """The message that one receive waits for.

    The nth receive from a rank by a key gets the nth message of that rank and key,
    whether the receive or the message comes first.
    """

    generation: int
    source: int
    key: Key
    number: int


class Inbox:
    """Parcels of one generation and later ones, until they are taken.

    Thread safe: one thread delivers, any thread takes.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parcels: dict[Ticket, Parcel] = {}
        self._arrived: Counter[tuple[int, int, Key]] = Counter()
        self._expected: Counter[tuple[int, int, Key]] = Counter()
        self._closed: dict[int, str] = {}
        self._oldest = 0

    def expect(self, generation: int, source: int, key: Key) -> Ticket:
        """Reserve the next message of `source` under `key`."""
        with self._changed:
            number = self._expected[generation, source, key]
            self._expected[generation, source, key] += 1
            return Ticket(generation, source, key, number)

    def deliver(self, generation: int, source: int, key: Key, parcel: Parcel) -> None:
        """Add a message, unless it belongs to a step that has failed."""
        with self._changed:
            if generation < self._oldest:
                return
            number = self._arrived[generation, source, key]
            self._arrived[generation, source, key] += 1
            self._parcels[Ticket(generation, source, key, number)] = parcel
            self._changed.notify_all()

    def close(self, source: int, reason: str) -> None:
        """Note that nothing more will come from `source`; the first reason counts."""
        with self._changed:
            self._closed.setdefault(source, reason)
            self._changed.notify_all()

    def closed(self, source: int) -> str | None:
        """Return why nothing more comes from `source`, None while it may."""
        with self._changed:
            return self._closed.get(source)

    def has(self, ticket: Ticket) -> bool:
        """Return whether the message of `ticket` is here."""
        with self._changed:
            return ticket in self._parcels

    def wait(self, ticket: Ticket, limit_s: float) -> bool:
        """Wait for the message or its source's end; return False after `limit_s`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: ticket in self._parcels or ticket.source in self._closed,
                limit_s,
            )

    def take(self, ticket: Ticket) -> Parcel | None:
        """Remove and return the message, None if it is not here."""
        with self._changed:
            return self._parcels.pop(ticket, None)

    def forget_until(self, generation: int) -> None:
        """Drop messages of `generation` and older ones, also those still to arrive."""
        with self._changed:
            self._oldest = generation + 1
            for ticket in [t for t in self._parcels if t.generation < self._oldest]:
                del self._parcels[ticket]
            for counter in (self._arrived, self._expected):
                for entry in [e for e in counter if e[0] < self._oldest]:
                    del counter[entry]
