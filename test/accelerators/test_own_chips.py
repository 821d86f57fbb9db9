"""Each rank of a host gets its own chips, as the vendors' pages say."""

import os
import subprocess
import sys

import pytest

from torch_xla_pp.accelerators import own_chips

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("ranks", "bounds", "chips"),
    [(4, "1,1,1", ["0", "1", "2", "3"]), (2, "1,2,1", ["0,1", "2,3"])],
)
def test_processes_that_do_not_communicate_are_those_of_the_tpu_example(
    ranks: int, bounds: str, chips: list[str]
) -> None:
    """Source: https://gist.github.com/skye/f82ba45d2445bb19d53545538754f9a3."""
    found = [own_chips("tpu:4", rank, ranks) for rank in range(ranks)]
    assert [one["TPU_VISIBLE_CHIPS"] for one in found] == chips
    assert {one["TPU_CHIPS_PER_PROCESS_BOUNDS"] for one in found} == {bounds}
    assert {one["TPU_PROCESS_BOUNDS"] for one in found} == {"1,1,1"}
    ports = [one["TPU_PROCESS_PORT"] for one in found]
    assert ports == [str(8476 + rank) for rank in range(ranks)]
    addresses = [one["TPU_PROCESS_ADDRESSES"] for one in found]
    assert addresses == [f"localhost:{port}" for port in ports]
    assert {one["CLOUD_TPU_TASK_ID"] for one in found} == {"0"}


def test_one_rank_has_the_whole_host() -> None:
    found = own_chips("tpu:4", 0, 1)
    assert found["TPU_VISIBLE_CHIPS"] == "0,1,2,3"
    assert found["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,2,1"


def test_cores_are_shared_as_in_the_example_of_neuron() -> None:
    """Source: the reference of the Neuron Runtime's environment variables."""
    found = [own_chips("neuron:4", rank, 2) for rank in range(2)]
    assert [one["NEURON_RT_VISIBLE_CORES"] for one in found] == ["0-1", "2-3"]
    assert {one["NEURON_PJRT_PROCESSES_NUM_DEVICES"] for one in found} == {"2"}
    assert {one["NEURON_PJRT_PROCESS_INDEX"] for one in found} == {"0"}
    assert len({one["NEURON_RT_ROOT_COMM_ID"] for one in found}) == 2
    assert own_chips("neuron:2", 1, 2)["NEURON_RT_VISIBLE_CORES"] == "1"


@pytest.mark.parametrize(
    ("host", "rank", "ranks", "fault"),
    [
        ("tpu", 0, 1, "expected one of tpu, neuron and a count, got 'tpu'"),
        ("gpu:4", 0, 1, "expected one of tpu, neuron and a count, got 'gpu:4'"),
        ("tpu:4", 0, 3, "expected 4 devices that 3 ranks of the host share evenly"),
        ("tpu:8", 0, 1, "expected ranks of 1, 2, 4 TPU chips"),
        ("tpu:4", 2, 2, "expected a local rank below 2, got 2"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    host: str, rank: int, ranks: int, fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        own_chips(host, rank, ranks)


def test_the_import_sets_them_unless_the_user_has() -> None:
    code = (
        "import os, sys, torch_xla_pp; names = ['TPU_VISIBLE_CHIPS', 'PJRT_DEVICE', "
        "'TPU_PROCESS_PORT']; print([os.environ[name] for name in names]); "
        "print('torch' in sys.modules)"
    )
    given = {"TORCH_XLA_PP_CHIPS": "tpu:4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    kept = {k: v for k, v in os.environ.items() if k not in ("PJRT_DEVICE", "RANK")}
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **given, "TPU_PROCESS_PORT": "9000"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "['2,3', 'TPU', '9000']\nFalse\n"
