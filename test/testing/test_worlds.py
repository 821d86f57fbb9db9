"""The harness shows what went wrong and always ends."""

import os
import time

import pytest
import torch
import torch.distributed as dist

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
        time.sleep(600)


def die() -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)


def environment() -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return {name: os.environ[name] for name in names}


def test_every_rank_returns_its_result(worlds: Worlds) -> None:
    results = worlds.run(add_up, ranks=2, devices=2, args=(5,))
    assert [(total, devices) for total, _, devices in results] == [(11, "2")] * 2


def test_processes_are_reused(worlds: Worlds) -> None:
    first = worlds.run(add_up, ranks=2, args=(1,))
    second = worlds.run(add_up, ranks=2, args=(2,))
    assert {pid for _, pid, _ in first} == {pid for _, pid, _ in second}


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
        worlds.run(fail_on_rank_1, ranks=2)
    text = str(caught.value)
    assert "rank 1 of 2, 1 devices: LookupError" in text
    assert "in fail_on_rank_1" in text
    assert "a word before the end" in text
    assert "rank 0" not in text


def test_a_hang_ends_and_shows_where(worlds: Worlds) -> None:
    outcomes = worlds.run_outcomes(hang, ranks=2, timeout_s=8)
    assert [outcome.error for outcome in outcomes] == ["Killed", ""]
    assert "in hang" in outcomes[0].traceback


def test_a_dead_process_is_reported(worlds: Worlds) -> None:
    outcomes = worlds.run_outcomes(die, ranks=2)
    assert [outcome.error for outcome in outcomes] == ["", "Died"]
