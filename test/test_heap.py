"""Memory that was freed is there for the next value, unless the user decides."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

# The module by itself, which takes a moment; in a thread, as XLA's programs run.
SCRIPT = """
import ctypes, importlib.util, resource, sys, threading

spec = importlib.util.spec_from_file_location("heap", sys.argv[1])
heap = importlib.util.module_from_spec(spec)
spec.loader.exec_module(heap)
heap.keep_freed()
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
size = 48 << 20

def use():
    place = c.malloc(ctypes.c_size_t(size))
    ctypes.memset(place, 1, size)
    c.free(place)

def run():
    use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
MODULE = Path(__file__).parent.parent / "torch_xla_pp" / "heap.py"


def page_faults(**variables: str) -> int:
    """Return how many pages a value of 48 MiB takes after one that was freed."""
    unset = {n: v for n, v in os.environ.items() if "MALLOC" not in n}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(MODULE)],
        env=unset | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(run.stdout)


def test_freed_memory_is_used_again() -> None:
    assert page_faults() < 100


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_users_settings_of_malloc_are_left_alone(name: str) -> None:
    value = "131072" if name.startswith("MALLOC") else "glibc.malloc.perturb=0"
    assert page_faults(**{name: value}) > 1000
