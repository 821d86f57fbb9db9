"""Memory of large values that the next ones use again, see `csrc/blocks.h`.

glibc maps large values one by one and unmaps them when they are freed, so each has
fresh pages, which cost more than to write them. To keep them in its heap instead would
leave gaps, see docs/design/042-large-blocks.md.
"""

import ctypes
import functools
import logging

from torch_xla_pp import native, xla_compat
from torch_xla_pp.cpu import heap

LEAST_APART_BYTES = 32 << 20
"""Size of the least values whose blocks are kept apart, without more than was in use.

There are few of them, logits for example, and one more would be much. Their pages are
large ones if the system has such.
"""

_logger = logging.getLogger(__name__)


@functools.cache
def find_blocks(chosen: tuple[str, ...]) -> ctypes.CDLL | None:
    """Let XLA use the memory of large values again, from the first call on.

    Args:
        chosen: Variables by which the user configured malloc, see `env.malloc_choices`;
            if there are any, nothing is changed.

    Returns:
        The library that does it, None if none does.
    """
    if chosen:
        return None
    try:
        found = native.library()
        base = native.base_address(xla_compat.library_path())
    except (native.Unavailable, LookupError) as reason:
        _logger.info("memory of large values is not used again: %s", reason)
        return None
    if not found.xpp_keep_blocks(base, heap.MOST_KEPT_BYTES, LEAST_APART_BYTES):
        _logger.info("memory of large values is not used again: XLA has other calls")
        return None
    return found


def drop_unused_blocks(chosen: tuple[str, ...]) -> None:
    """Begin a step: return blocks to the system that the last one has not used."""
    found = find_blocks(chosen)
    if found is not None:
        found.xpp_begin_step_of_blocks()


def drop_blocks(chosen: tuple[str, ...]) -> None:
    """Return all blocks to the system that nothing uses."""
    found = find_blocks(chosen)
    if found is not None:
        found.xpp_drop_blocks()
