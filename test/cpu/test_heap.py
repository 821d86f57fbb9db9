"""Memory that was freed is there for the next value, unless the user decides."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

# The modules by themselves, which takes a moment; in a thread, as XLA's programs run.
SCRIPT = """
import ctypes, importlib.util, resource, sys, threading

def load(path):
    spec = importlib.util.spec_from_file_location("module", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

env, heap = map(load, sys.argv[1:3])
heap.keep_freed(env.malloc_choices())
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
count, size = map(int, sys.argv[3:5])

def use():
    places = [c.malloc(ctypes.c_size_t(size)) for _ in range(count)]
    for place in places:
        ctypes.memset(place, 1, size)
    for place in places:
        c.free(place)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def run():
    if "large" in sys.argv[5:]:
        keeping = heap.keep_large(env.malloc_choices())
        keeping.__enter__()
        use()
        print(faults())
        keeping.__exit__(None, None, None)
        print(faults())
        return
    use()
    if sys.argv[5:]:
        heap.give_back(env.malloc_choices())
    print(faults())

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
PACKAGE = Path(__file__).parents[2] / "torch_xla_pp"
MODULES = [str(PACKAGE / name) for name in ("env.py", "cpu/heap.py")]


def page_faults(
    *options: str, count: int = 96, size: int = 1 << 19, **variables: str
) -> int:
    """Return how many pages values of 48 MiB take after others that were freed.

    With "large" that is while large values are kept, with "after", too, after that.
    """
    others = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC", "GLIBC"))
    }
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *MODULES, str(count), str(size), *options],
        env=others | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(run.stdout.split()["after" in options])


def test_freed_memory_is_used_again() -> None:
    # A value or two may find no place where they were: of 12,288 pages few are new.
    assert page_faults() < 600


def test_what_compilations_leave_is_given_back_but_not_against_the_users_will() -> None:
    assert page_faults("give back") > 10_000
    kept = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": "1048576"}
    kept["MALLOC_ARENA_MAX"] = "1"
    assert page_faults("give back", **kept) < 600


def test_large_values_leave_no_places_for_small_ones() -> None:
    assert page_faults(count=12, size=4 << 20) > 1000


def test_large_values_are_kept_for_a_while() -> None:
    assert page_faults("large", count=1, size=48 << 20) < 600
    assert page_faults("large", "after", count=1, size=48 << 20) > 1000
    variables = {"MALLOC_MMAP_THRESHOLD_": "1048576"}
    assert page_faults("large", count=1, size=48 << 20, **variables) > 1000


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_users_settings_of_malloc_are_left_alone(name: str) -> None:
    value = "131072" if name.startswith("MALLOC") else "glibc.malloc.perturb=0"
    assert page_faults(**{name: value}) > 1000
