"""Messages of bytes between the ranks of a group, by gloo.

Terms: a *message* is a head (512 bytes: what follows) and *parts*, each sent by a gloo
message of its own straight from the buffer that holds it. A *key* is any tuple of
texts and numbers; messages match by (generation, source, key) and, among equals, by
order. User tags, stage messages and collectives have keys of different first words.

Law: whatever was sent is taken by the receiver's process at once, whether or not the
program there asks for it yet. gloo's own send ends only when its receiver has posted
a buffer, so one thread per peer reads all the time, and one thread keeps outgoing
buffers alive until they have left. Hence a send never waits for the peer's program,
a dead peer is noticed at once, and no gloo call needs a time limit (a gloo wait that
times out closes the connection).

Closing is a handshake: a rank says farewell, the peer's reader answers in the same
way and ends. gloo keeps order, so whatever was sent before the farewell has arrived.
"""

import contextlib
import logging
import pickle
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_xla_pp.errors import TransportError
from torch_xla_pp.transport.c10d import PrefixStore, ProcessGroupGloo, Store
from torch_xla_pp.transport.inbox import Inbox, Key, Parcel, Ticket
from torch_xla_pp.transport.rendezvous import Rendezvous, StoreLost

_HEAD_BYTES = 512
_SIZE = struct.Struct("<q")
_FAREWELL = -1
_REPORT: Key = ("report",)
_GLOO_TAG = 0
_FOREVER = timedelta(days=3650)
_CLOSE_S = 5.0

_logger = logging.getLogger(__name__)


class Wire:
    """Carry messages between the ranks of one group.

    All ranks of the group must construct it, as gloo connects them here.

    Args:
        store: The store of the group.
        rendezvous: The group's error channel, polled while a receive waits.
    """

    def __init__(self, store: Store, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._rank = rendezvous.rank
        # Any: the type stubs lack a backend's send and recv.
        self._gloo: Any = ProcessGroupGloo(
            PrefixStore("wire/", store), self._rank, rendezvous.size, _FOREVER
        )
        self._inbox = Inbox()
        self._lock = threading.Lock()
        self._parted: set[int] = set()
        self._is_closed = False
        self._leaving: SimpleQueue[tuple[int, list[dist.Work], list[Tensor]] | None] = (
            SimpleQueue()
        )
        self._sender = _start(self._release_sent, "sender")
        self._readers = [
            _start(self._read_from, f"reader of rank {peer}", peer)
            for peer in range(rendezvous.size)
            if peer != self._rank
        ]
        rendezvous.join(self)

    @property
    def rank(self) -> int:
        """Return the rank of this process in the group."""
        return self._rank

    def send(self, peer: int, key: Key, header: Any, parts: Sequence[Tensor]) -> None:
        """Send a message to `peer` and return at once.

        Args:
            peer: Rank in the group; one's own is allowed.
            key: What the receiver asks for.
            header: Any value that pickles.
            parts: Contiguous uint8 CPU tensors; not to be changed afterwards.

        Raises:
            TransportError: The peer has left or its connection is lost.
        """
        generation = self._rendezvous.generation
        if peer == self._rank:
            self._inbox.deliver(generation, peer, key, Parcel(header, list(parts)))
            return
        sizes = [part.numel() for part in parts]
        head = _encode((generation, key, sizes, header))
        try:
            self._post(peer, [*head, *(part for part in parts if part.numel())])
        except RuntimeError as error:
            self._inbox.close(peer, _lost(error))
            raise self._gone(peer, f"send {_name(key)}") from error

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
        self._rendezvous.wait_until(
            lambda limit_s: self._inbox.wait(ticket, limit_s),
            timeout_s,
            lambda: f"rank {ticket.source}: recv {_name(ticket.key)}",
        )
        parcel = self._inbox.take(ticket)
        if parcel is None:
            raise self._gone(ticket.source, f"recv {_name(ticket.key)}")
        return parcel

    def report(self, generation: int, report: str) -> None:
        """Tell every peer that is still there that this rank failed."""
        for peer in range(self._rendezvous.size):
            if peer != self._rank:
                with contextlib.suppress(RuntimeError):
                    self._post(peer, _encode((generation, _REPORT, [], report)))

    def end(self, generation: int) -> None:
        """Forget the messages of a generation that this rank leaves."""
        self._inbox.forget_until(generation)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Make sure that all messages have arrived, and part from every peer.

        Waits at most `timeout_s` seconds. What has arrived may still be received.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for peer in range(self._rendezvous.size):
            if peer != self._rank:
                self._part(peer)
        self._leaving.put(None)
        deadline = _Deadline(timeout_s)
        for thread in [*self._readers, self._sender]:
            thread.join(deadline.left_s())
            if thread.is_alive():
                _logger.warning(
                    "rank %d: %s did not end within %g s: messages may be lost",
                    self._rank,
                    thread.name,
                    timeout_s,
                )

    def _gone(self, peer: int, what: str) -> TransportError:
        """Return the error for a lost peer; raises the peer's own if it told one."""
        with contextlib.suppress(StoreLost):
            self._rendezvous.check()
        return TransportError(
            f"{what}: rank {peer} is gone: {self._inbox.closed(peer)} (seen on rank "
            f"{self._rank}). Look for the first error of rank {peer}."
        )

    def _post(self, peer: int, buffers: list[Tensor]) -> None:
        with self._lock:
            if peer in self._parted:
                raise RuntimeError("the group was left")
            self._post_locked(peer, buffers)

    def _post_locked(self, peer: int, buffers: list[Tensor]) -> None:
        works = [self._gloo.send([data], peer, _GLOO_TAG) for data in buffers]
        self._leaving.put((peer, works, buffers))

    def _part(self, peer: int) -> None:
        with self._lock:
            if peer in self._parted or self._inbox.closed(peer) is not None:
                return
            self._parted.add(peer)
            try:
                self._post_locked(peer, [_farewell()])
            except RuntimeError as error:
                self._inbox.close(peer, _lost(error))

    def _release_sent(self) -> None:
        while (item := self._leaving.get()) is not None:
            peer, works, _buffers = item
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                self._inbox.close(peer, _lost(error))
            del item, works, _buffers

    def _read_from(self, peer: int) -> None:
        try:
            while (meta := self._read_meta(peer)) is not None:
                generation, key, sizes, header = meta
                if key == _REPORT:
                    self._rendezvous.tell(generation, header)
                    continue
                parts = self._read(peer, sizes)
                self._inbox.deliver(generation, peer, key, Parcel(header, parts))
                del parts
            self._part(peer)
            self._inbox.close(peer, "it has left the group or its program has ended")
        except Exception as error:  # whatever it is, receives must not wait for more
            self._inbox.close(peer, _lost(error))

    def _read_meta(self, peer: int) -> Any:
        data = bytes(self._read(peer, [_HEAD_BYTES])[0].numpy())
        (size,) = _SIZE.unpack_from(data)
        if size == _FAREWELL:
            return None
        if _SIZE.size + size <= _HEAD_BYTES:
            return pickle.loads(data[_SIZE.size : _SIZE.size + size])
        return pickle.loads(bytes(self._read(peer, [size])[0].numpy()))

    def _read(self, peer: int, sizes: Sequence[int]) -> list[Tensor]:
        parts = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        filled = [part for part in parts if part.numel()]
        for work in [self._gloo.recv([part], peer, _GLOO_TAG) for part in filled]:
            work.wait()
        return parts


def _encode(meta: Any) -> list[Tensor]:
    data = pickle.dumps(meta)
    head = bytearray(_HEAD_BYTES)
    _SIZE.pack_into(head, 0, len(data))
    if _SIZE.size + len(data) <= _HEAD_BYTES:
        head[_SIZE.size : _SIZE.size + len(data)] = data
        return [torch.frombuffer(head, dtype=torch.uint8)]
    return [
        torch.frombuffer(head, dtype=torch.uint8),
        torch.frombuffer(bytearray(data), dtype=torch.uint8),
    ]


def _farewell() -> Tensor:
    head = bytearray(_HEAD_BYTES)
    _SIZE.pack_into(head, 0, _FAREWELL)
    return torch.frombuffer(head, dtype=torch.uint8)


def _name(key: Key) -> str:
    return " ".join(str(word) for word in key)


def _lost(error: BaseException) -> str:
    return f"its connection is lost ({error})"


def _start(target: Callable[..., None], what: str, *args: int) -> threading.Thread:
    """Start a thread that does not keep the process alive."""
    thread = threading.Thread(
        target=target, args=args, name=f"xla_pp {what}", daemon=True
    )
    thread.start()
    return thread


class _Deadline:
    """Share one time limit between several waits."""

    def __init__(self, timeout_s: float) -> None:
        self._end_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())
