"""Connections between the ranks of a group, and the frames that go through them.

Terms: a *frame* is a kind, a content that pickles, and parts, which are bytes. A rank's
*neighbours* are its parent and its children in a tree over all ranks, with which it is
connected from the start; other pairs are connected when one of the two first sends.

Laws:

* One thread of the process does all reading and writing, for all groups. The number
  of connections of a rank grows with its communication partners, not with the group:
  it has at most `FANOUT` + 1 neighbours.
* Frames from one rank to another arrive whole and in order. Sending never waits.
* The end of a connection is the end of its rank: one that leaves sends a farewell
  first, one that does not is lost. The system closes the connections of a process that
  ends in whatever way, even if no process collects its exit code.

A stopped process is not seen here, as its connections stay.
"""

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import pickle
import secrets
import socket
import struct
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from torch_xla_pp import env
from torch_xla_pp.errors import TransportError
from torch_xla_pp.transport.gloo_compat import PrefixStore, Store

Traffic = Literal["control", "data"]
Receiver = Callable[[int, Any, list[Tensor]], None]

FANOUT = 32
"""The most children of a rank in the tree."""

TOKEN_BYTES = 16

_KINDS: tuple[Traffic, ...] = ("control", "data")
_FAREWELL = len(_KINDS)
_HEAD = struct.Struct("<BQ")  # kind, bytes of the pickled content
_HELLO = struct.Struct(f"<{TOKEN_BYTES}sI")  # token, rank
_JOIN_BYTES = 1 << 16  # smaller parts are joined with the bytes before them
# A host that is gone is noticed after these seconds in total.
_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 5,
}
_END_S = 5.0
_NEWS_S = 5.0  # a rank that is not there has left, or the tree tells of its loss before
LEFT = "it has left the group or its program has ended"

_logger = logging.getLogger(__name__)


class Sockets:
    """The connections between the ranks of one group. All of them must construct it.

    Receivers are called on the thread of the connections, in the order of events, and
    must not wait.

    Args:
        store: The store of the group, by which ranks find each other.
        rank: Rank of this process in the group.
        size: Number of ranks in the group.

    Attributes:
        rank: As given.
        size: As given.
        neighbours: The ranks that this one is connected with from the start.
        token: Secret of the ranks of the group.

    Raises:
        TransportError: The store is gone, or a rank does not join.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = PrefixStore("sockets/", store)
        self._links: dict[int, _Link] = {}
        self._fates: dict[int, str] = {}
        self._receivers: dict[int, Receiver] = {}
        self._gone: list[Callable[[int, str, bool], None]] = []
        self._is_closed = False
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[socket.socket] = set()
        # Rank → its connections that are being read.
        self._num_read: Counter[int] = Counter()
        parent = (rank - 1) // FANOUT
        children = range(rank * FANOUT + 1, min(size, (rank + 1) * FANOUT + 1))
        self.neighbours = (*([parent] if rank else []), *children)
        if rank == 0:
            self._store.set("token", secrets.token_hex(TOKEN_BYTES))
        self.token = bytes.fromhex(self._look_up("token", 0).decode())
        self._links |= {child: _Link() for child in children}
        self._loop = _loop()
        _all().add(self)

    def open(self) -> None:
        """Connect with the neighbours, as soon as frames can be received."""
        listener = _listen()
        self._store.set(str(self.rank), _address(listener))
        self._start(self._accept(listener))
        if self.rank:
            self._connect(self.neighbours[0])

    def on(self, kind: Traffic, receiver: Receiver) -> None:
        """Pass frames of a kind to `receiver`, with their source; call it early."""
        self._receivers[_KINDS.index(kind)] = receiver

    def on_gone(self, receiver: Callable[[int, str, bool], None]) -> None:
        """Pass each rank that is gone, the reason, and whether it is lost."""
        self._gone.append(receiver)

    def fate(self, peer: int) -> str | None:
        """Return why a rank is gone, None if it is not, as far as this rank knows."""
        return self._fates.get(peer)

    def is_connected(self, peer: int) -> bool:
        """Return whether there is a connection to a rank, or was one."""
        return peer in self._links or peer == self.rank

    def send(
        self, peer: int, kind: Traffic, content: Any, parts: Sequence[Tensor] = ()
    ) -> None:
        """Send a frame to another rank; returns at once.

        Args:
            peer: Rank in the group.
            kind: The kind, which selects the peer's receiver.
            content: Any value that pickles.
            parts: Contiguous uint8 CPU tensors; not to be changed afterwards.

        Raises:
            TransportError: The peer is gone, or this rank has left.
        """
        reason = "the group was left" if self._is_closed else self.fate(peer)
        if reason is not None:
            raise TransportError(f"send to rank {peer}: {reason}.")
        link = self._links.get(peer) or self._connect(peer)
        frame = _encode(_KINDS.index(kind), content, parts)
        self._loop.call_soon_threadsafe(link.put, frame)

    def send_if_there(self, peer: int, kind: Traffic, content: Any) -> None:
        """Send a frame to another rank, unless that or this one has gone."""
        with contextlib.suppress(TransportError):
            self.send(peer, kind, content)

    def close(self, timeout_s: float) -> bool:
        """Send all frames, then a farewell; return whether all were sent.

        Waits at most `timeout_s` seconds.
        """
        with self._lock:
            if self._is_closed:
                return True
            self._is_closed = True
        parting = asyncio.run_coroutine_threadsafe(self._part(timeout_s), self._loop)
        try:
            return parting.result(timeout_s + 1.0)
        except TimeoutError:
            return False

    # Connecting.

    def _look_up(self, key: str, of_rank: int) -> bytes:
        try:
            return self._store.get(key)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank}: expected rank {of_rank} to join the group, got no "
                f"word of it: {error}. See whether that rank still runs, and where the "
                "store lives: in torchrun or in rank 0."
            ) from error

    def _connect(self, peer: int) -> "_Link":
        """Connect to a rank, as this one is the first to send."""
        port, host = self._look_up(str(peer), peer).decode().split()
        with self._lock:
            if peer in self._links:
                return self._links[peer]
            link = self._links[peer] = _Link(is_dialed=True)
        self._start(self._dial(peer, link, host, int(port)))
        return link

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task on the thread of the connections, and keep it alive."""

        def begin() -> None:
            task = self._loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(begin)

    @contextlib.contextmanager
    def _owning(self, connection: socket.socket) -> Iterator[None]:
        """Close a socket when the task that reads it ends.

        No task may wait for a closed socket: another one may get its number.
        """
        connection.setblocking(False)
        self._open.add(connection)
        try:
            yield
        finally:
            self._open.discard(connection)
            connection.close()

    async def _dial(self, peer: int, link: "_Link", host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        with self._owning(connection):
            try:
                await self._loop.sock_connect(connection, (host, port))
                _tune(connection)
                hello = _HELLO.pack(self.token, self.rank)
                await self._loop.sock_sendall(connection, hello)
            except OSError as error:
                link.end()
                await asyncio.sleep(_NEWS_S)
                self._end(peer, f"it cannot be reached ({error})", is_lost=True)
                return
            await self._serve(peer, link, connection)

    async def _accept(self, listener: socket.socket) -> None:
        with self._owning(listener):
            while True:
                connection, _ = await self._loop.sock_accept(listener)
                self._start(self._welcome(connection))

    async def _welcome(self, connection: socket.socket) -> None:
        """Accept a connection that another rank has made."""
        with self._owning(connection):
            try:
                _tune(connection)
                data = await self._read(connection, _HELLO.size)
            except OSError:
                return
            token, peer = _HELLO.unpack(data.numpy().tobytes())
            if not secrets.compare_digest(token, self.token) or peer >= self.size:
                _logger.warning(
                    "rank %d: refused a connection from an unknown peer", self.rank
                )
                return
            with self._lock:
                link = self._links.setdefault(peer, _Link())
            if self._is_closed:
                link.part()
            await self._serve(peer, link, connection)

    async def _serve(self, peer: int, link: "_Link", connection: socket.socket) -> None:
        """Read a connection to its end; also write to it, unless there is another."""
        if link.connection is not None:
            await self._read_all(peer, connection)
            return
        link.connection = connection
        writing = self._loop.create_task(self._write_all(link, connection))
        try:
            await self._read_all(peer, connection)
        finally:
            writing.cancel()
            await asyncio.wait([writing])
            link.end()

    # Reading and writing.

    async def _write_all(self, link: "_Link", connection: socket.socket) -> None:
        """Write frames; whoever reads the connection notices its end."""
        try:
            while True:
                frame = await link.take()
                for data in frame:
                    await self._loop.sock_sendall(connection, data)
                link.done()
        except OSError:
            link.end()
            # What has come, such as a farewell, is read before.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    async def _read_all(self, peer: int, connection: socket.socket) -> None:
        """Read a connection to its end, or to the peer's farewell."""
        try:
            await self._read_frames(peer, connection)
        except OSError as error:
            # Another connection may have the farewell.
            if self._num_read[peer]:
                await asyncio.sleep(_NEWS_S)
            self._end(peer, f"its connection is lost ({error})", is_lost=True)
        except Exception as error:  # Receives must end, too.
            _logger.exception("rank %d: a message of rank %d", self.rank, peer)
            self._end(peer, f"its message is not understood ({error})", is_lost=True)
        else:
            self._end(peer, LEFT, is_lost=False)

    async def _read_frames(self, peer: int, connection: socket.socket) -> None:
        """Read frames until a farewell comes."""
        self._num_read[peer] += 1
        try:
            while True:
                head = await self._read(connection, _HEAD.size)
                kind, size = _HEAD.unpack(head.numpy().tobytes())
                if kind == _FAREWELL:
                    return
                data = await self._read(connection, size)
                sizes, content = pickle.loads(data.numpy().tobytes())
                parts = [await self._read(connection, size) for size in sizes]
                self._receivers[kind](peer, content, parts)
                del data, content, parts
        finally:
            self._num_read[peer] -= 1

    async def _read(self, connection: socket.socket, size: int) -> Tensor:
        """Read so many bytes.

        Raises:
            OSError: The connection ended before.
        """
        data = torch.empty(size, dtype=torch.uint8)
        left = memoryview(data.numpy())  # type: ignore[arg-type]
        while left:
            count = await self._loop.sock_recv_into(connection, left)
            if not count:
                raise ConnectionError("its end was reached")
            left = left[count:]
        return data

    def _end(self, peer: int, reason: str, *, is_lost: bool) -> None:
        """Report once that a rank is gone; on the thread of the connections."""
        if self._is_closed or peer in self._fates:
            return
        self._fates[peer] = reason
        for receiver in self._gone:
            receiver(peer, reason, is_lost)

    async def _part(self, timeout_s: float) -> bool:
        """Send all frames and a farewell, and wait for the peers to do so."""
        links = [
            link
            for peer, link in self._links.items()
            if peer not in self._fates and (link.is_dialed or link.connection)
        ]
        for link in links:
            link.part()
        sent = asyncio.gather(*(link.all_done() for link in links))
        try:
            await asyncio.wait_for(sent, timeout_s)
        except TimeoutError:
            return False
        finally:
            # Incoming frames are read to the end, so that none is lost.
            self._loop.call_later(timeout_s, self._end_tasks)
        return True

    def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    def close_in_child(self) -> None:
        """Leave the connections to the parent after a fork: it alone is the rank."""
        for connection in self._open:
            with contextlib.suppress(OSError):
                os.close(connection.detach())


class _Link:
    """The frames to be sent to one rank; used on the thread of the connections.

    Args:
        is_dialed: Whether this rank makes the connection.

    Attributes:
        connection: The connection to the rank, None until there is one.
        is_dialed: As given.
    """

    def __init__(self, *, is_dialed: bool = False) -> None:
        self.is_dialed = is_dialed
        self.connection: socket.socket | None = None
        self._frames: deque[list[bytes | memoryview]] = deque()
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_over = self._is_parting = False

    def put(self, frame: list[bytes | memoryview]) -> None:
        """Append a frame, unless the peer is gone."""
        if not self._is_over:
            self._frames.append(frame)
            self._idle.clear()
            self._changed.set()

    def part(self) -> None:
        """Append a farewell, once."""
        if not self._is_parting:
            self._is_parting = True
            self.put([_HEAD.pack(_FAREWELL, 0)])

    async def take(self) -> list[bytes | memoryview]:
        """Wait for a frame and remove it."""
        while not self._frames:
            self._changed.clear()
            await self._changed.wait()
        return self._frames.popleft()

    def done(self) -> None:
        """Note that the frame that was taken has been written."""
        if not self._frames:
            self._idle.set()

    def end(self) -> None:
        """Drop all frames, as the peer is gone and needs none of them."""
        self._is_over = True
        self._frames.clear()
        self._idle.set()

    async def all_done(self) -> None:
        """Wait until all frames have been written, or the peer is gone."""
        await self._idle.wait()


def _encode(
    kind: int, content: Any, parts: Sequence[Tensor]
) -> list[bytes | memoryview]:
    """Return the bytes of a frame; small ones in one piece."""
    data = pickle.dumps(([part.numel() for part in parts], content))
    pieces: list[bytes | memoryview] = [_HEAD.pack(kind, len(data)) + data]
    for part in parts:
        bytes_of_part = memoryview(part.numpy())  # type: ignore[arg-type]
        if len(bytes_of_part) < _JOIN_BYTES and isinstance(pieces[-1], bytes):
            pieces[-1] += bytes_of_part.tobytes()
        else:
            pieces.append(bytes_of_part)
    return pieces


def _listen() -> socket.socket:
    """Return a socket that other hosts of the job can reach."""
    host = _own_host()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(1024)
    return listener


def _own_host() -> str:
    """Return the address of this host towards the job's first one."""
    for host in (env.master_host(), socket.gethostname()):
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else []
            for family, kind, _, _, address in found:
                # Connecting a datagram socket sends nothing; it only chooses a route.
                with socket.socket(family, kind) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
    return "127.0.0.1"


def _address(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"{port} {host}"


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the loop of the one thread of all connections.

    It ends before the interpreter does: a thread that returns from C++ code, such as
    the making of a tensor, while the interpreter exits would end the process by
    "terminate called without an active exception".
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=loop.run_forever, name="xla_pp sockets", daemon=True
    )
    thread.start()

    def end() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_END_S)

    atexit.register(end)
    return loop


@functools.cache
def _all() -> "weakref.WeakSet[Sockets]":
    """Return the connections of all groups of this process."""
    found: weakref.WeakSet[Sockets] = weakref.WeakSet()

    def close_in_child() -> None:
        for sockets in found:
            sockets.close_in_child()
        _loop.cache_clear()

    os.register_at_fork(after_in_child=close_in_child)
    return found
