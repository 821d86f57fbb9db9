"""A job on this machine has ranks with the variables that torchrun sets."""

import os
import socket
from pathlib import Path
from unittest import mock

import pytest

from torch_xla_pp import local_job
from torch_xla_pp.local_job import free_port, run_locally

pytestmark = pytest.mark.pure

SHOW = (
    "import os; print(*(os.environ[n] for n in "
    "('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'CPU_NUM_DEVICES', 'MASTER_ADDR')))"
)


def test_every_rank_gets_its_place_in_the_job() -> None:
    found = run_locally(["-c", SHOW], ranks=2, devices=3, is_quiet=True)
    texts = [rank.output for rank in found]
    assert texts == ["0 0 2 3 127.0.0.1\n", "1 1 2 3 127.0.0.1\n"]
    assert [rank.code for rank in found] == [0, 0]


def test_devices_are_those_of_the_environment_if_not_given() -> None:
    with mock.patch.dict(os.environ, CPU_NUM_DEVICES="7"):
        (found,) = run_locally(["-c", SHOW], ranks=1, is_quiet=True)
    assert found.output == "0 0 1 7 127.0.0.1\n"


def test_a_job_inside_of_another_has_a_store_of_its_own() -> None:
    show = "import os; print('TORCHELASTIC_USE_AGENT_STORE' in os.environ)"
    with mock.patch.dict(os.environ, TORCHELASTIC_USE_AGENT_STORE="True", RANK="5"):
        (found,) = run_locally(["-c", show], ranks=1, is_quiet=True)
    assert found.output == "False\n"


def test_exit_codes_are_told_and_who_is_late_is_ended() -> None:
    code = "import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(3)\n"
    found = run_locally(
        ["-c", f"{code}time.sleep(60)"], ranks=2, timeout_s=2.0, is_quiet=True
    )
    assert [rank.code for rank in found] == [3, None]


def test_a_free_port_is_none_that_the_system_may_give_away() -> None:
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not given.exists() or int(given.read_text().split()[0]) < 32768:
        pytest.skip("this host gives other ports to connections than most")
    assert all(free_port() < 32768 for _ in range(100))


def test_a_port_on_which_a_process_listens_is_not_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free := free_port()))
        listener.listen()
        other = free_port()
        with mock.patch.object(local_job, "_PORTS", (free, other)):
            assert {free_port() for _ in range(20)} == {other}
