"""Environment variables are read in one place and refused clearly."""

import os
from pathlib import Path

import pytest

from torch_xla_pp import env

pytestmark = pytest.mark.pure


def test_the_transport_is_one_that_there_is_or_left_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_XLA_PP_TRANSPORT", raising=False)
    names = ("in_graph", "host")
    assert env.transport(names) is None
    for name in names:
        monkeypatch.setenv("TORCH_XLA_PP_TRANSPORT", name)
        assert env.transport(names) == name
    monkeypatch.setenv("TORCH_XLA_PP_TRANSPORT", "ingraph")
    with pytest.raises(ValueError, match="TORCH_XLA_PP_TRANSPORT: expected one of"):
        env.transport(names)


def test_products_are_the_best_ones_unless_the_user_chooses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_XLA_PP_PRODUCTS", raising=False)
    assert env.products() is None
    for name in ("openblas", "torch", "xla"):
        monkeypatch.setenv("TORCH_XLA_PP_PRODUCTS", name)
        assert env.products() == name
    monkeypatch.setenv("TORCH_XLA_PP_PRODUCTS", "mkl")
    with pytest.raises(ValueError, match="TORCH_XLA_PP_PRODUCTS: expected one of"):
        env.products()


@pytest.mark.parametrize("before", [None, "Haswell"])
def test_kernels_of_openblas_are_the_users_choice_first(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if before:
        monkeypatch.setenv("OPENBLAS_CORETYPE", before)
    with env.openblas_choices("SkylakeX"):
        assert os.environ["OPENBLAS_CORETYPE"] == (before or "SkylakeX")
        assert os.environ["OPENBLAS_NUM_THREADS"] == "1"
    assert os.environ.get("OPENBLAS_CORETYPE") == before
    assert "OPENBLAS_NUM_THREADS" not in os.environ


def test_flags_for_xla_are_added_to_the_users_and_never_replace_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=here")
    assert env.add_xla_flag("xla_some", "false")
    assert not env.add_xla_flag("xla_some", "false")
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=here --xla_some=false"
    assert not env.add_xla_flag("xla_dump_to", "there")
    monkeypatch.delenv("XLA_FLAGS")
    env.set_defaults()
    assert "XLA_FLAGS" not in os.environ


def test_analyses_go_to_a_file_of_the_process_unless_the_user_chooses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("PT_XLA_DEBUG", "PT_XLA_DEBUG_LEVEL", "PT_XLA_DEBUG_FILE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert env.analyses() is None
    # As a process that was started by another finds it.
    monkeypatch.setenv("PT_XLA_DEBUG_FILE", "/proc/1/fd/3")
    env.set_defaults()
    own = env.analyses()
    assert own is not None
    assert own.parts[2] == str(os.getpid())
    own.write_text("kept")
    env.set_defaults()
    assert env.analyses() == own
    assert own.read_text() == "kept"
    monkeypatch.delenv("PT_XLA_DEBUG_FILE")
    env.set_defaults()
    assert env.analyses() is None


def test_programs_are_written_into_the_ranks_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_XLA_PP_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    assert env.dump_dir() == tmp_path / "rank3"
    monkeypatch.setenv("XLA_FLAGS", "--xla_some=true")
    env.set_defaults()
    assert f"--xla_dump_to={tmp_path}/rank3/hlo --xla_dump" in os.environ["XLA_FLAGS"]


def test_a_pool_grows_to_what_is_needed_and_never_shrinks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    assert env.enlarge_pool(1) == cores
    assert "PJRT_NPROC" not in os.environ
    assert env.enlarge_pool(cores + 3) == cores + 3
    assert os.environ["PJRT_NPROC"] == str(cores + 3)
    assert env.enlarge_pool(cores + 1) == cores + 3
    monkeypatch.setenv("PJRT_NPROC", "many")
    monkeypatch.setenv("NPROC", "90")
    assert env.pool_size() == 90


def test_a_plan_says_how_many_devices_a_rank_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"ranks": [{"devices": 2}, {"devices": 3}]}')
    monkeypatch.setenv("TORCH_XLA_PP_PLAN", str(path))
    for rank, count in enumerate("2323"):
        monkeypatch.delenv("CPU_NUM_DEVICES", raising=False)
        monkeypatch.setenv("RANK", str(rank))
        env.set_defaults()
        assert os.environ["CPU_NUM_DEVICES"] == count
    monkeypatch.setenv("CPU_NUM_DEVICES", "5")
    env.set_defaults()
    assert os.environ["CPU_NUM_DEVICES"] == "5"


@pytest.mark.parametrize("text", ["", "[]", '{"ranks": []}', '{"ranks": [{}]}'])
def test_what_is_no_plan_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    monkeypatch.setenv("TORCH_XLA_PP_PLAN", str(path))
    with pytest.raises(ValueError, match="expected a file that PipelinePlan.to_json"):
        env.set_defaults()


def test_a_compiler_of_other_devices_inherits_nothing_of_those_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("XLA_FLAGS", "TPU_VISIBLE_CHIPS", "TORCH_XLA_PP_DUMP_DIR"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("HOME", "/home/me")
    found = env.for_compiler("/tmp/logs")
    assert {"XLA_FLAGS", "TPU_VISIBLE_CHIPS"}.isdisjoint(found)
    assert not any(name.startswith("TORCH_XLA_PP_") for name in found)
    assert (found["HOME"], found["TMPDIR"]) == ("/home/me", "/tmp/logs")
    assert found["TPU_SKIP_MDS_QUERY"] == "1"
