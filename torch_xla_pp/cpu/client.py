"""XLA's client for CPU devices: its start, its heap, and its launches."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from torch_xla_pp import env, xla_compat
from torch_xla_pp.cpu import blocks, heap
from torch_xla_pp.cpu.before_client import num_threads, prepare_client
from torch_xla_pp.cpu.handlers import has_own_ops
from torch_xla_pp.errors import PipelineError

# A token's numbers, and how often each is multiplied and added to. XLA takes a program
# of less than 1,000 operations as cheap, and counts a call as -1.
_NUMBERS, _ROUNDS = 64, 16


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Do all that a rank on CPU devices needs around the start of its client.

    Raises:
        PipelineError: The client was made before, with too few threads.
    """
    if env.device_kind() != "CPU":
        yield
        return
    heap.keep_freed(env.malloc_choices())
    if not xla_compat.has_client():
        prepare_client()
    yield
    _check_pool()
    blocks.find_blocks(env.malloc_choices())


def begin_step(*, has_compiled: bool) -> None:
    """Return memory to the system that the last step has not used, on CPU devices.

    Args:
        has_compiled: Whether programs were compiled since. That has freed memory of the
            heap, which compilations share with values; all of it is returned.
    """
    if env.device_kind() != "CPU":
        return
    chosen = env.malloc_choices()
    if has_compiled:
        blocks.drop_blocks(chosen)
        heap.give_back(chosen)
    blocks.drop_unused_blocks(chosen)


def most_small_bytes() -> int:
    """Return the size of the largest values whose memory, once freed, is for others.

    They are also freed late: as a program ends, its successor allocates all of its
    memory on another thread; values that only the first one has read are freed after
    that, or at the same time. Memory of larger values is kept apart, or returned.
    """
    if env.device_kind() != "CPU":
        return 0
    is_kept = blocks.find_blocks(env.malloc_choices()) is not None
    return blocks.LEAST_APART_BYTES - 1 if is_kept else heap.MOST_KEPT_BYTES


def is_recycling() -> bool:
    """Return whether programs write what they save to buffers of earlier values.

    A heap that takes the same values back in another order gets gaps. Ranks of several
    devices do not: XLA chooses the shardings of saved values.
    """
    return env.device_kind() == "CPU" and xla_compat.num_local_devices() == 1


def most_joined_bytes() -> int:
    """Return how much a forward may save where it is one program with its backward.

    Then it is among the program's temporary values, which are one block: one more of
    them would be much if it were large. Zero where what is saved takes no memory of
    earlier values: what one program would win on other devices has not been measured.
    """
    return most_small_bytes() if is_recycling() else 0


def launched_apart(token: Tensor) -> Tensor:
    """Return a token whose program XLA does not run on the thread that launches it.

    XLA does that with programs in which it counts few operations, and a call counts as
    none, so a program of calls alone would let the next launch wait until it has ended.
    A token of some numbers that are multiplied and added up takes next to no time. On
    one CPU device.

    Args:
        token: A pending token of a program, of one whole number.
    """
    if not has_own_ops():
        return token
    numbers = torch.arange(_NUMBERS, dtype=token.dtype, device=token.device)
    for _ in range(_ROUNDS):
        token = token * numbers + numbers
    return token < 0


@contextlib.contextmanager
def copying_large_values() -> Iterator[None]:
    """Keep the memory of large values from one to the next, on CPU devices."""
    if env.device_kind() != "CPU":
        yield
        return
    chosen = env.malloc_choices()
    with heap.keep_large(chosen):
        yield
        blocks.drop_blocks(chosen)


def _check_pool() -> None:
    """Refuse a client that was made before, with too few threads."""
    count = xla_compat.num_local_devices()
    found, needed = env.pool_size(), num_threads(count)
    if found < needed:
        raise PipelineError(
            f"XLA's client was made with {found} threads for {count} devices: expected "
            f"at least {needed}, or programs can wait for each other for ever. Import "
            "torch_xla_pp before anything uses XLA, and set CPU_NUM_DEVICES before "
            f"that; or set PJRT_NPROC={needed} at the launch."
        )
