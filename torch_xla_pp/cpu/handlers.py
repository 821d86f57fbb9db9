"""The compiled library's ops for programs of CPU devices."""

import ctypes
import functools
import logging
import os

from torch_xla_pp import native, xla_compat

_logger = logging.getLogger(__name__)


@functools.cache
def find_handlers() -> ctypes.CDLL | None:
    """Return the library, which knows how many cores a device has; None without one.

    Called when the rank's devices are known.
    """
    try:
        found = native.library()
    except native.Unavailable as reason:
        _logger.info("XLA computes products and sums itself: %s", reason)
        return None
    # As many devices compute at the same time.
    cores = len(os.sched_getaffinity(0)) // xla_compat.num_local_devices()
    found.xpp_use_cores(max(1, cores))
    return found
