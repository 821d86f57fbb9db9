"""What is wrong with a machine is found, with what mends it."""

import os
from pathlib import Path
from unittest import mock

import pytest

from torch_xla_pp import health
from torch_xla_pp.cli import main
from torch_xla_pp.health import Check, Diagnosis, doctor
from torch_xla_pp.local_job import RankResult

CLEAN = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}


def looked(**variables: str) -> dict[str, Check]:
    """Return the checks by name, in an environment with some variables."""
    with mock.patch.dict(os.environ, CLEAN | variables, clear=True):
        return {check.name: check for check in doctor(ping=False).checks}


@pytest.mark.pure
def test_nothing_is_wrong_where_the_tests_run() -> None:
    found = looked()
    assert {name for name, check in found.items() if check.state == "wrong"} == set()
    assert {"torch", "torch_xla", "libucx-cu12", "compiled library"} <= found.keys()
    assert {"network", "shared memory", "threads", "open files"} <= found.keys()


@pytest.mark.pure
@pytest.mark.parametrize(
    ("name", "text", "state", "remedy"),
    [
        ("PJRT_DEVICE", "CUP", "wrong", "Set it to one of CPU, TPU"),
        ("PJRT_DEVICE", "CUDA", "wrong", "Install torch_xla_cuda_plugin"),
        ("PJRT_DEVICE", "CPU", "ok", ""),
        ("CPU_NUM_DEVICES", "two", "wrong", "number of devices of a rank"),
        ("CPU_NUM_DEVICES", "4", "ok", ""),
        ("TORCH_XLA_PP_TIMEOUT_S", "0", "wrong", "a positive number of seconds"),
        ("TORCH_XLA_PP_TIMEOUT_S", "5", "ok", ""),
        ("TORCH_XLA_PP_TRANSPORT", "tcp", "wrong", "expected one of"),
        ("TORCH_XLA_PP_TIMEOUT", "5", "wrong", "Did you mean TORCH_XLA_PP_TIMEOUT_S?"),
        (
            "TORCH_XLA_PP_X",
            "5",
            "wrong",
            "There are TORCH_XLA_PP_CHIPS, TORCH_XLA_PP_DUMP_DIR",
        ),
    ],
)
def test_variables_that_mean_nothing_are_found(
    name: str, text: str, state: str, remedy: str
) -> None:
    check = looked(**{name: text})[name]
    assert check.state == state
    assert remedy in check.remedy


@pytest.mark.pure
def test_a_pool_that_is_too_small_is_told() -> None:
    check = looked(CPU_NUM_DEVICES="4", PJRT_NPROC="2")["threads"]
    assert (check.state, check.remedy[:20]) == ("note", "9 threads are needed")


@pytest.mark.pure
def test_other_versions_and_a_missing_library_are_told(tmp_path: Path) -> None:
    with (
        mock.patch("importlib.metadata.version", lambda _: "1.0"),
        mock.patch.object(health, "__file__", str(tmp_path / "health.py")),
        mock.patch("shutil.which", lambda _: None),
    ):
        found = looked()
    assert found["torch"].remedy == "Run: pip install 'torch==2.9.*'"
    assert found["torch_xla"].state == "wrong"
    assert found["compiled library"].state == found["compiler"].state == "note"


@pytest.mark.pure
def test_a_host_that_cannot_be_found_is_told() -> None:
    check = looked(MASTER_ADDR="nowhere.invalid")["network"]
    # The last of that name is this host; the list has both.
    with mock.patch.dict(os.environ, MASTER_ADDR="nowhere.invalid"):
        wrong = [c for c in doctor(ping=False).checks if c.state == "wrong"]
    assert [c.name for c in wrong] == ["network"]
    assert "nowhere.invalid" in wrong[0].found
    assert check.state == "ok"


@pytest.mark.pure
@pytest.mark.parametrize(
    ("result", "text"),
    [
        (RankResult(code=1, output="a\nValueError: no"), "rank 1 failed"),
        (RankResult(code=None, output=""), "rank 1 did not end in 7 s"),
    ],
)
def test_a_ping_that_fails_shows_how(result: RankResult, text: str) -> None:
    ended = [RankResult(code=0, output=""), result]
    with mock.patch.object(health, "run_locally", lambda *_, **__: ended):
        check = doctor(timeout_s=7.0).checks[-1]
    assert check.state == "wrong"
    assert text in check.found
    assert result.output[-14:] in check.found


@pytest.mark.pure
def test_a_diagnosis_is_a_list_with_remedies() -> None:
    ok = Check(name="a", state="ok", found="1")
    bad = Check(name="long", state="wrong", found="2", remedy="Do it.")
    assert str(Diagnosis(checks=(ok, bad))).splitlines() == [
        "ok     a     1",
        "wrong  long  2",
        "             → Do it.",
    ]
    assert Diagnosis(checks=(ok,)).is_healthy
    assert not Diagnosis(checks=(ok, bad)).is_healthy


@pytest.mark.pure
def test_the_command_ends_with_1_if_anything_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--no-ping"]) == 0
    monkeypatch.setenv("CPU_NUM_DEVICES", "x")
    assert main(["doctor", "--no-ping"]) == 1
    assert "Set it to the number" in capsys.readouterr().out


@pytest.mark.worlds
def test_two_ranks_answer() -> None:
    with mock.patch.dict(os.environ, {"CPU_NUM_DEVICES": "1"}):
        check = doctor(timeout_s=280.0).checks[-1]
    assert check.state == "ok", check.found
    assert check.found.startswith("2 ranks of 1 CPU devices trained a step")
    assert "in_graph" in check.found
