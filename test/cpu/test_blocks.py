"""XLA uses the memory of large values again, unless the user has configured malloc."""

import ctypes
import resource
import time
from collections.abc import Callable

import pytest
import torch

import torch_xla_pp
from torch_xla_pp import cpu, env, native, xla_compat
from torch_xla_pp.cpu import blocks
from torch_xla_pp.testing import Worlds

SIDE = 1024
ONE_VALUE = 4 * SIDE * SIDE
M_MMAP_THRESHOLD = -3  # of malloc.h
# Values of 4 MiB have 1,024 pages, and a run makes four of them.
RUNS, FRESH = 8, 8 * 1000
STEPS = 32  # for which a block waits
# Rows of a value that is kept apart, and how many small pages it has.
MANY_ROWS, PAGES = 12 * SIDE, 12 * 1024


def page_faults(runs: int = RUNS, rows: int = SIDE, *, drops: bool = False) -> int:
    """Return how many pages runs of a program take, when it has run before.

    Args:
        runs: Number of runs.
        rows: Rows of its four results.
        drops: Whether to give back all memory that waits before each run.
    """
    x = xla_compat.replicate(torch.ones(rows, SIDE))
    for attempt in range(2 + runs):
        if attempt == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        if drops:
            await_waiting(lambda waiting: not waiting, drop)
        results = [x * 2, x + 1, x - 3, x / 4]
        xla_compat.materialize(results)
        xla_compat.wait_device()
        del results
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def await_waiting(wanted: Callable[[int], bool], begin: Callable[[], None]) -> int:
    """Return the bytes that wait after `begin`, once as wanted or in the end."""
    end = time.monotonic() + 20
    while True:
        begin()
        waiting = int(native.library().xpp_waiting_bytes())
        if wanted(waiting) or time.monotonic() > end:
            return waiting
        time.sleep(0.1)  # what is dropped is freed on other threads


def drop() -> None:
    blocks.drop_blocks(env.malloc_choices())


def waiting_after_steps(*, has_compiled: bool) -> int:
    """Return the bytes that wait after steps, once there are none or in the end."""

    def begin_steps() -> None:
        for _ in range(STEPS):
            cpu.begin_step(has_compiled=has_compiled)

    return await_waiting(lambda waiting: not waiting, begin_steps)


def measure() -> dict[str, int]:
    """Return page faults of runs, and bytes that wait then and later."""
    torch_xla_pp.device()
    # On a busy machine what a program has read may be freed after the next one began.
    found = {"faults": min(page_faults() for _ in range(3))}
    if blocks.find_blocks(env.malloc_choices()) is None:
        return found
    larger = [page_faults(1, MANY_ROWS) for _ in range(3)]
    found["faults of larger ones"] = min(larger)
    # What a program has read may also be freed after all that waited was dropped.
    fresh = [page_faults(1, MANY_ROWS, drops=True) for _ in range(3)]
    found["faults of fresh ones"] = max(fresh)
    found["waiting"] = await_waiting(lambda waiting: waiting > ONE_VALUE, lambda: None)
    found["after steps"] = waiting_after_steps(has_compiled=False)
    page_faults()
    found["after compilations"] = waiting_after_steps(has_compiled=True)
    return found


@pytest.fixture(scope="module")
def kept() -> dict[str, int]:
    with Worlds() as worlds:
        return worlds.run(measure, ranks=1, timeout_s=120)[0]


def test_the_memory_of_large_values_is_used_again(kept: dict[str, int]) -> None:
    assert kept["faults"] < FRESH // 4
    assert kept["waiting"] > ONE_VALUE


def test_so_is_that_of_larger_ones(kept: dict[str, int]) -> None:
    assert kept["faults of larger ones"] < PAGES // 16


@pytest.mark.usefixtures("large_pages")
def test_larger_ones_have_large_pages(kept: dict[str, int]) -> None:
    # A quarter of four values: the parts of large pages at both ends are small pages.
    assert 0 < kept["faults of fresh ones"] < PAGES


def measure_with_mappings() -> dict[str, int]:
    """Return what `measure` does where malloc maps values of 1 MiB and more.

    Workers are forked, and glibc reads its variables only where a process begins.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    return measure()


def test_what_a_step_has_not_used_is_given_back(kept: dict[str, int]) -> None:
    assert kept["after steps"] == 0


def test_compilations_give_all_of_it_back(kept: dict[str, int]) -> None:
    assert kept["after compilations"] == 0


def test_the_users_settings_of_malloc_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    with Worlds() as worlds:
        found = worlds.run(measure_with_mappings, ranks=1, timeout_s=120)[0]
    assert found.keys() == {"faults"}
    assert found["faults"] > FRESH


def test_a_library_that_is_not_loaded_has_no_calls_to_lead() -> None:
    assert not native.library().xpp_keep_blocks(1 << 20, 1 << 40, 1 << 40)
