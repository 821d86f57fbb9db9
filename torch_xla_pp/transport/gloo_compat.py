"""The only place that touches private parts of torch.distributed.

Its classes of process groups are exported in a way that type checkers do not see.
"""

import contextlib
import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)
from torch.distributed import distributed_c10d

__all__ = [
    "AllgatherOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "GroupMaker",
    "PrefixStore",
    "Store",
    "attach_gloo",
    "forget_group_numbers",
    "wrap_backend",
]

GroupMaker: TypeAlias = Callable[..., dist.ProcessGroup]

# Threads make groups one after the other, as stdout is redirected for the time.
_redirecting = threading.Lock()


def attach_gloo(
    group: dist.ProcessGroup,
    devices: Sequence[str],
    store: Store,
    timeout: timedelta,
) -> dist.ProcessGroup:
    """Make gloo the backend of a group; it connects pairs of ranks only when needed.

    Returns:
        An object with the methods of a group, though it is not one in torch's sense.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_default_device(lazy_init=True)]
    options._timeout = timeout
    with _redirecting, without_lines(b"[Gloo] Rank "):
        gloo = ProcessGroupGloo(store, group.rank(), group.size(), options)
    kind = dist.ProcessGroup.BackendType.GLOO
    for device in devices:
        group._register_backend(torch.device(device), kind, gloo)
    group._set_default_backend(kind)
    return cast(dist.ProcessGroup, gloo)


@contextlib.contextmanager
def without_lines(prefix: bytes) -> Iterator[None]:
    """Drop some lines that C++ code prints in the block.

    gloo prints on stdout that it has no connections yet, and has no setting against it.
    All other lines are printed when the block has ended.
    """
    flush = ctypes.CDLL(None).fflush
    try:
        file = tempfile.TemporaryFile()
        stdout = sys.__stdout__.fileno() if sys.__stdout__ else -1
        before = os.dup(stdout)
    except (OSError, ValueError):
        yield
        return
    flush(None)
    os.dup2(file.fileno(), stdout)
    try:
        yield
    finally:
        flush(None)
        os.dup2(before, stdout)
        os.close(before)
        with file:
            file.seek(0)
            for line in file:
                if not line.startswith(prefix):
                    os.write(stdout, line)


def wrap_backend(name: str, wrap: Callable[[GroupMaker], GroupMaker]) -> None:
    """Replace the function that makes the groups of a registered backend.

    Args:
        name: Its name in capitals.
        wrap: Takes the present function, returns the new one.
    """
    plugins: dict[str, Any] = dist.Backend._plugins
    plugin = plugins[name]
    plugins[name] = plugin._replace(creator_fn=wrap(plugin.creator_fn))


def forget_group_numbers() -> None:
    """Let the next group have the name of the first.

    torch names a group by the number of groups it has tried to make, and ranks meet by
    that name.
    """
    distributed_c10d._world.group_count = 0
