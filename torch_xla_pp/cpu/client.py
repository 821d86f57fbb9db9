"""XLA's client for CPU devices: what it needs before it is made.

The client's pool has threads that launch programs, one for each device, and others that
run them, one for each device, since those of one launch begin when the launch before
has ended; all of these may wait. One more is for copies. With one device
programs are launched by their caller. See docs/design/024-in-flight.md.
"""

import contextlib
from collections.abc import Iterator

from torch_xla_pp import env, xla_compat
from torch_xla_pp.cpu import heap
from torch_xla_pp.errors import PipelineError


def prepare_client() -> None:
    """Set what XLA reads as it makes a client for CPU devices; there is none yet.

    Called when torch_xla is loaded, too, so that it holds for a client that the program
    makes itself. XLA's matrix products are faster without XNNPACK, see
    docs/performance/step.md.
    """
    if env.device_kind() == "CPU":
        env.add_xla_flag("xla_cpu_use_xnnpack", "false")
        env.enlarge_pool(_num_threads(env.num_cpu_devices()))


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


def give_back_garbage() -> None:
    """Give the memory that compilations have left back to the system, on CPU devices.

    There programs and compilations take it from one heap.
    """
    if env.device_kind() == "CPU":
        heap.give_back(env.malloc_choices())


def most_small_bytes() -> int:
    """Return the size of the largest values whose memory stays here once freed.

    They are freed late, too: as a program ends, its successor takes all of its memory
    on another thread; only then, or meanwhile, what the first one alone has read is
    freed. Larger values have mappings of their own, whose pages come as they are
    written, and go.
    """
    return heap.MOST_KEPT_BYTES if env.device_kind() == "CPU" else 0


@contextlib.contextmanager
def copying_large_values() -> Iterator[None]:
    """Keep the memory of large values from one to the next, on CPU devices."""
    if env.device_kind() != "CPU":
        yield
        return
    with heap.keep_large(env.malloc_choices()):
        yield


def _num_threads(num_devices: int) -> int:
    """Return how many threads a client needs to avoid a deadlock."""
    return 2 if num_devices == 1 else 2 * num_devices + 1


def _check_pool() -> None:
    """Refuse a client that was made before, with too few threads."""
    count = xla_compat.num_local_devices()
    found, needed = env.pool_size(), _num_threads(count)
    if found < needed:
        raise PipelineError(
            f"XLA's client was made with {found} threads for {count} devices: expected "
            f"at least {needed}, or programs can wait for each other for ever. Import "
            "torch_xla_pp before anything uses XLA, and set CPU_NUM_DEVICES before "
            f"that; or set PJRT_NPROC={needed} at the launch."
        )
