"""Waiting for what other threads do."""

import time
from collections.abc import Callable


def wait(is_so: Callable[[], bool]) -> None:
    """Wait until something is so, for 20 s at most."""
    limit_s = time.monotonic() + 20
    while not is_so() and time.monotonic() < limit_s:
        time.sleep(0.005)
    assert is_so()
