"""What only CPU devices need is set for these, and for nothing else."""

import json
import os
import subprocess
import sys

import pytest

from torch_xla_pp import cpu, env, xla_compat
from torch_xla_pp.cpu import heap
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.on_import import prepare_process

pytestmark = pytest.mark.pure

SCRIPT = """
import json, os
before = dict(os.environ)
import torch_xla
theirs = dict(os.environ)
os.environ.clear()
os.environ.update(before)
import torch_xla_pp
torch_xla_pp.device, torch_xla_pp.PipelineStage
from torch_xla_pp import cpu
cpu.prepare_client()
print(json.dumps([theirs, dict(os.environ)]))
"""
OURS = ("XLA_FLAGS", "PJRT_NPROC", "NPROC", "TORCH_XLA_PP_DUMP_DIR")


def added_by_an_import(**variables: str) -> dict[str, str]:
    """Return what an import of the package sets, beside what torch_xla sets itself."""
    inherited = {name: text for name, text in os.environ.items() if name not in OURS}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    theirs, ours = json.loads(run.stdout.splitlines()[-1])
    return {name: text for name, text in ours.items() if theirs.get(name) != text}


def test_nothing_is_set_for_devices_of_another_kind() -> None:
    added = added_by_an_import(PJRT_DEVICE="TPU", CPU_NUM_DEVICES="64")
    assert "PJRT_NPROC" not in added
    assert not [name for name, text in added.items() if "xla_cpu" in text]


def test_cpu_devices_get_threads_and_programs_without_xnnpack_and_mlir() -> None:
    added = added_by_an_import(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="64")
    flags = added["XLA_FLAGS"].split()
    assert {
        "--xla_cpu_use_xnnpack=false",
        "--xla_cpu_use_fusion_emitters=false",
    } <= set(flags)
    assert added["PJRT_NPROC"] == "129"


def test_the_users_flag_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(env, "enlarge_pool", lambda _: None)
    mine = "--xla_cpu_use_xnnpack=true --xla_cpu_use_fusion_emitters=true"
    monkeypatch.setenv("XLA_FLAGS", mine)
    cpu.prepare_client()
    assert os.environ["XLA_FLAGS"] == mine


def test_a_client_that_is_there_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_compat, "has_client", lambda: True)
    monkeypatch.setattr(xla_compat, "num_local_devices", lambda: 1)
    monkeypatch.setattr(heap, "keep_freed", lambda _: None)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("PJRT_NPROC", "1")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    with pytest.raises(PipelineError, match="made with 1 threads"), cpu.starting():
        pass
    prepare_process()
    assert "XLA_FLAGS" not in os.environ
    assert os.environ["PJRT_NPROC"] == "1"


def test_the_products_of_other_devices_are_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setattr(xla_compat, "num_local_devices", lambda: 1)
    assert cpu.library_product.__wrapped__() is None


@pytest.mark.parametrize(("kind", "calls"), [("TPU", 0), ("CPU", 1)])
def test_malloc_is_told_to_keep_what_is_freed_for_cpu_devices_alone(
    monkeypatch: pytest.MonkeyPatch, kind: str, calls: int
) -> None:
    settings: list[tuple[str, ...]] = []
    monkeypatch.setenv("PJRT_DEVICE", kind)
    monkeypatch.setattr(xla_compat, "has_client", lambda: True)
    monkeypatch.setattr(xla_compat, "num_local_devices", lambda: 1)
    monkeypatch.setattr(heap, "keep_freed", settings.append)
    monkeypatch.setenv("PJRT_NPROC", "2")
    with cpu.starting():
        assert len(settings) == calls
