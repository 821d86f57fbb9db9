"""One core for all threads of a rank, whoever starts them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

_TASKS = Path("/proc/self/task")


def pin(core: int) -> None:
    """Bind every thread of this process to `core`; later ones inherit that.

    Call it before the XLA client is created, which sizes its thread pools by the
    cores that it may use. Importing torch_xla has already started threads.
    """
    torch.set_num_threads(1)
    for task in _TASKS.iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {core})


def check_pinned(core: int) -> None:
    """Raise if a thread of this process may run elsewhere than on `core`."""
    strays = [
        f"{status['Name']}: cores {status['Cpus_allowed_list']}"
        for status in _statuses()
        if status["Cpus_allowed_list"] != str(core)
    ]
    if strays:
        raise RuntimeError(
            f"pinning: expected all threads on core {core}, got {'; '.join(strays)}."
        )


def _statuses() -> Iterator[dict[str, str]]:
    """Read what the kernel reports of each thread; some may end meanwhile."""
    for task in _TASKS.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = (task / "status").read_text().splitlines()
            pairs = (line.partition(":") for line in lines)
            yield {name: value.strip() for name, _, value in pairs}
