"""The harness shows what went wrong and always ends."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist

from torch_xla_pp import xla_compat
from torch_xla_pp.testing import Worlds, WorldsFailed

pytestmark = pytest.mark.worlds


def add_up(value: int) -> tuple[int, int, str]:
    dist.init_process_group("gloo")
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return int(total), os.getpid(), os.environ["CPU_NUM_DEVICES"]


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        print("a word before the end", flush=True)
        raise LookupError("no such thing")


def hang() -> None:
    if os.environ["RANK"] == "0":
        print("a long text" * 400, flush=True)
        time.sleep(600)


def hang_without_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise LookupError("no such thing")
    time.sleep(600)


def say(text: str) -> int:
    print(text, flush=True)
    return os.getpid()


def own_pid() -> int:
    return os.getpid()


def wait_with_pid(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def interrupt(pid: int) -> None:
    os.kill(pid, signal.SIGINT)
    time.sleep(600)


def make_tensor() -> torch.Tensor:
    return torch.arange(3)


def return_a_lambda() -> object:
    return lambda: None


def die() -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)


def environment() -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert int(os.environ["MASTER_PORT"]) > 0
    return {name: os.environ[name] for name in names}


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    # A process that has ended but was not waited for is in state Z.
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_every_rank_returns_its_result(worlds: Worlds) -> None:
    results = worlds.run(add_up, ranks=2, devices=2, args=(5,))
    assert [(total, devices) for total, _, devices in results] == [(11, "2")] * 2


def test_ranks_may_have_other_numbers_of_devices(worlds: Worlds) -> None:
    results = worlds.run(add_up, ranks=3, devices=(1, 2, 1), args=(0,))
    assert [devices for _, _, devices in results] == ["1", "2", "1"]
    again = worlds.run(add_up, ranks=2, devices=(2, 1), args=(0,))
    assert {pid for _, pid, _ in again} < {pid for _, pid, _ in results}
    with pytest.raises(ValueError, match="one number for each of 2 ranks, got"):
        worlds.run(add_up, ranks=2, devices=(1, 2, 1), args=(0,))


def test_processes_are_reused(worlds: Worlds) -> None:
    first = worlds.run(add_up, ranks=2, args=(1,))
    second = worlds.run(add_up, ranks=2, args=(2,))
    assert {pid for _, pid, _ in first} == {pid for _, pid, _ in second}


def draw(is_uneven: bool) -> list[float]:
    more = is_uneven and os.environ["RANK"] == "0"
    numbers = [float(torch.rand(())), random.random(), float(numpy.random.rand())]
    return numbers + (draw(False) if more else [])


def test_ranks_draw_alike_whatever_ran_in_them_before(worlds: Worlds) -> None:
    first, second = worlds.run(draw, ranks=2, args=(True,))
    assert first != second
    assert worlds.run(draw, ranks=2, args=(False,)) == [second, second]


def test_the_environment_is_torchruns(worlds: Worlds) -> None:
    assert worlds.run(environment, ranks=2)[1] == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }


def test_a_failure_shows_the_traceback_and_output_of_its_rank(worlds: Worlds) -> None:
    with pytest.raises(WorldsFailed) as caught:
        worlds.run(fail_on_rank_1, ranks=2, keep_workers=True)
    text = str(caught.value)
    assert "rank 1 of 2, 1 devices: LookupError" in text
    assert "in fail_on_rank_1" in text
    assert "a word before the end" in text
    assert "rank 0" not in text


def test_a_hang_ends_and_shows_where(worlds: Worlds) -> None:
    outcomes = worlds.run_outcomes(hang, ranks=2, timeout_s=2)
    assert [outcome.error for outcome in outcomes] == ["Killed", ""]
    assert "still running after 2 s" in outcomes[0].message
    assert "in hang" in outcomes[0].traceback
    assert not is_running(outcomes[0].pid)


def test_a_dead_process_is_reported(worlds: Worlds) -> None:
    outcomes = worlds.run_outcomes(die, ranks=2)
    assert [outcome.error for outcome in outcomes] == ["", "Died"]
    assert "code 3" in outcomes[1].message


def test_a_failure_ends_the_ranks_that_wait_for_it(worlds: Worlds) -> None:
    start_s = time.monotonic()
    with pytest.raises(WorldsFailed, match="LookupError: no such thing") as caught:
        worlds.run(hang_without_rank_1, ranks=2)
    assert time.monotonic() - start_s < 60
    assert "after rank 1 failed" in str(caught.value)
    assert "in hang_without_rank_1" in str(caught.value)


def test_workers_of_a_failed_run_are_not_used_again(worlds: Worlds) -> None:
    before = set(worlds.run(own_pid, ranks=2))
    worlds.run_outcomes(fail_on_rank_1, ranks=2, keep_workers=True)
    assert set(worlds.run(own_pid, ranks=2)) == before
    worlds.run_outcomes(fail_on_rank_1, ranks=2)
    assert not set(worlds.run(own_pid, ranks=2)) & before
    assert not any(is_running(pid) for pid in before)


def test_a_failure_shows_the_output_of_its_own_run(worlds: Worlds) -> None:
    worlds.run(say, ranks=2, args=("words of an earlier run",))
    outcomes = worlds.run_outcomes(fail_on_rank_1, ranks=2, keep_workers=True)
    assert "a word before the end" in outcomes[1].traceback
    assert "words of an earlier run" not in outcomes[1].traceback


def test_a_tensor_outlives_its_worker() -> None:
    with Worlds() as worlds:
        (result,) = worlds.run(make_tensor, ranks=1)
    assert result.tolist() == [0, 1, 2]


def test_a_result_that_cannot_be_sent_is_an_error(worlds: Worlds) -> None:
    (outcome,) = worlds.run_outcomes(return_a_lambda, ranks=1, keep_workers=True)
    assert "pickle" in outcome.message


def fail_to_join() -> None:
    xla_compat.enable_spmd()
    with pytest.raises(ValueError, match='backend "xla" does not work under SPMD'):
        dist.init_process_group("xla", init_method="env://")


def join() -> None:
    dist.init_process_group("xla_pp")


def test_ranks_meet_when_one_of_them_has_failed_to_join_before() -> None:
    with Worlds() as worlds:
        worlds.run(fail_to_join, ranks=1)
        worlds.run(join, ranks=2, devices=(1, 2), timeout_s=30)


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Take interrupts, which shells let processes in the background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_ends_the_workers() -> None:
    with Worlds() as worlds:
        (pid,) = worlds.run(own_pid, ranks=1)
        with pytest.raises(KeyboardInterrupt):
            worlds.run(interrupt, ranks=1, args=(os.getpid(),))
        assert not is_running(pid)


def test_a_hanging_worker_ends_with_its_parent(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = (
        "from test_worlds import *\n"
        f"Worlds().run(wait_with_pid, ranks=1, args=({str(note)!r},))"
    )
    here = str(Path(__file__).parent)
    parent = subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": here}
    )
    while not note.exists() or not note.read_text():
        assert parent.poll() is None
        time.sleep(0.2)
    parent.kill()
    parent.wait()
    limit_s = time.monotonic() + 60
    while is_running(int(note.read_text())):
        assert time.monotonic() < limit_s
        time.sleep(0.2)
