"""Keep freed memory in this process, for the values of the next step.

On a CPU device XLA takes the memory of every value from malloc and gives it back when
the value is dropped, in the same sizes in every step. By default glibc returns much of
that to the system at once, and each step pays for fresh pages again, see
docs/performance/step.md. The price of keeping it is that the process never shrinks.

The memory of large values is not kept: small values that live long would settle in the
places that they leave, the next large one would not fit there, and the process would
grow with the number of microbatches.

Memory that compilations free is not kept either: they take tens of MiB that no step
needs.
"""

import contextlib
import ctypes
import functools
import logging
from collections.abc import Iterator

MOST_KEPT_BYTES = 1 << 20
"""Size of the largest values whose memory is kept when they are freed, usually.

That of a larger one may be, too: glibc uses a free place of the heap if one fits.
"""

# Parameter of mallopt → value. One heap for all threads, as those of single threads
# are small; mappings for large values alone; no return of what is free.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_SETTINGS = {
    _ARENA_MAX: 1,
    _MMAP_THRESHOLD: MOST_KEPT_BYTES,
    _TRIM_THRESHOLD: (1 << 31) - 1,
}

# The most values that may have mappings of their own, and glibc's default.
_MMAP_MAX, _MMAP_MAX_DEFAULT = -4, 1 << 16

_logger = logging.getLogger(__name__)


@functools.cache
def keep_freed(chosen: tuple[str, ...]) -> None:
    """Let glibc keep freed memory, unless the user has configured it.

    Threads that have allocated before keep their heaps, so call it early. Does nothing
    with another C library.

    Args:
        chosen: Variables by which the user configured it, see `env.malloc_choices`.
    """
    if chosen:
        _logger.info("malloc is left as %s says", ", ".join(chosen))
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    for parameter, value in _SETTINGS.items():
        mallopt(parameter, value)


def give_back(chosen: tuple[str, ...]) -> None:
    """Return freed memory to the system, unless the user has configured glibc.

    The next values take fresh pages once, so call it when something was compiled.

    Args:
        chosen: Variables by which the user configured it, see `env.malloc_choices`.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and not chosen:
        trim(ctypes.c_size_t(0))


@contextlib.contextmanager
def keep_large(chosen: tuple[str, ...]) -> Iterator[None]:
    """Keep the memory of large values, too, and return all of it at the end.

    For values that are made and dropped one after the other: otherwise each of them
    takes fresh pages, which costs several times as much as copying it.

    Args:
        chosen: Variables by which the user configured glibc, see `env.malloc_choices`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or chosen:
        yield
        return
    mallopt(_MMAP_MAX, 0)
    try:
        yield
    finally:
        mallopt(_MMAP_MAX, _MMAP_MAX_DEFAULT)
        give_back(chosen)
