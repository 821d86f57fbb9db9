"""The connections of ranks that share one process."""

import contextlib
import socket
import time
from collections.abc import Callable

from torch._C._distributed_c10d import HashStore

from torch_xla_pp.transport.sockets import Sockets


def sockets_of(size: int) -> list[Sockets]:
    """Return the connections of each rank, none of which is made yet."""
    store = HashStore()
    return [Sockets(store, rank, size) for rank in range(size)]


def end(sockets: Sockets) -> None:
    """Do what the system does with connections when their process ends."""
    for connection in list(sockets._open):
        with contextlib.suppress(OSError):  # the one that listens
            connection.shutdown(socket.SHUT_RDWR)


def wait(is_so: Callable[[], bool]) -> None:
    """Wait for what is under way, for 20 s at most."""
    limit_s = time.monotonic() + 20
    while not is_so() and time.monotonic() < limit_s:
        time.sleep(0.005)
    assert is_so()
