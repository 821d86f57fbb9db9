"""Whatever goes wrong, all ranks hear of it and the last good checkpoint stays."""

import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_xla_pp as xpp
from checkpoint.runs import Layout, Run
from torch_xla_pp.checkpoint import saving
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

LAYOUT = Layout(ranks=2)


def begin(folder: str) -> Run:
    """Join, and save a first checkpoint."""
    dist.init_process_group("xla_pp")
    run = Run(LAYOUT)
    run.step()
    xpp.checkpoint.save(run.state, f"{folder}/step-1")
    return run


def error_text(call: Callable[[], Any]) -> str:
    """Return the error that a call raises."""
    with pytest.raises(xpp.CheckpointError) as caught:
        call()
    return str(caught.value)


def assert_one_error(texts: list[str], match: str) -> None:
    """The ranks have one text, but for where it was raised."""
    plain = {re.sub(r" \(raised on rank \d.*", "", text) for text in texts}
    assert len(plain) == 1, plain
    assert re.search(match, plain.pop())


def cannot_write(folder: str, how: str) -> str:
    run = begin(folder)
    path = f"{folder}/step-2"

    def save() -> Any:
        return xpp.checkpoint.save(run.state, path)

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1 and how == "full":
        # As a disk that is full: a write fails in the middle of a file.
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limit[1]))
    if dist.get_rank() == 0 and how == "open":
        make = saving.folders.begin

        def begin_blocked(path: Path) -> Path:
            partial = make(path)
            (partial / "__1_0.distcp").mkdir()
            return partial

        saving.folders.begin = begin_blocked
    try:
        if how == "make":
            path = "/proc/no/such"
            text = error_text(save)
            path = f"{folder}/step-2"
        elif how == "full":
            # Told by the next call.
            xpp.checkpoint.async_save(run.state, path)
            run.step()
            text = error_text(save)
        else:
            text = error_text(save)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        if dist.get_rank() == 0 and how == "open":
            saving.folders.begin = make
    dist.barrier()
    assert xpp.checkpoint.latest(folder) == Path(folder) / "step-1"
    assert [path.name for path in Path(folder).iterdir()] == ["step-1"]
    # Training goes on, and the next save is as if nothing had been.
    dist.barrier()
    run.step()
    save()
    xpp.checkpoint.load(run.state, folder + "/step-2")
    dist.destroy_process_group()
    return text


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("full", r"expected to write .*step-2, got .*\(rank 1\)"),
        ("open", r"expected to write .*step-2, got IsADirectoryError.*\(rank 1\)"),
        ("make", r"expected to make /proc/no/such, got "),
    ],
)
def test_a_save_that_fails_is_told_to_all_and_changes_nothing(
    worlds: Worlds, tmp_path: Path, how: str, match: str
) -> None:
    args = (str(tmp_path), how)
    texts = worlds.run(cannot_write, ranks=2, args=args, timeout_s=300)
    assert_one_error(texts, match)


def dies(folder: str, when: str) -> str:
    run = begin(folder)
    if dist.get_rank() == 1:

        def die(*_: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        if when == "write":
            saving.Writer.write_data = die
        else:
            saving.SavePlanner.create_local_plan = die
    with pytest.raises(xpp.TransportError) as caught:
        xpp.checkpoint.save(run.state, f"{folder}/step-2")
    return str(caught.value)


@pytest.mark.parametrize("when", ["plan", "write"])
def test_a_rank_that_dies_in_a_save_is_told_to_the_others(
    worlds: Worlds, tmp_path: Path, when: str
) -> None:
    args = (str(tmp_path), when)
    survivor, dead = worlds.run_outcomes(dies, ranks=2, args=args, timeout_s=300)
    assert not survivor.error, survivor
    assert "rank 1" in survivor.value and "is gone" in survivor.value
    assert dead.error
    assert xpp.checkpoint.latest(tmp_path) == tmp_path / "step-1"


def damaged(folder: str, name: str) -> str:
    run = begin(folder)
    path = Path(folder) / "step-1" / name
    if dist.get_rank() == 0:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 16
        path.write_bytes(data)
    dist.barrier()
    before = run.values()
    text = error_text(lambda: xpp.checkpoint.load(run.state, path.parent))
    for name, value in run.values().items():
        assert torch.equal(value, before[name])
    dist.destroy_process_group()
    return text


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata"])
def test_a_damaged_file_is_refused_on_every_rank(
    worlds: Worlds, tmp_path: Path, name: str
) -> None:
    """Only one of them reads the file."""
    args = (str(tmp_path), name)
    texts = worlds.run(damaged, ranks=2, args=args, timeout_s=300)
    assert_one_error(texts, f"step-1/{name}: expected .* damaged")


class Other(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        kind = nn.Linear(3, 3) if index else nn.Linear(8, 16)
        self.blocks = nn.ModuleDict({str(index): nn.ModuleDict({"up": kind})})


def another_model(folder: str) -> str:
    run = begin(folder)
    rank = dist.get_rank()
    stage = xpp.PipelineStage(Other(rank), rank, 2, xpp.device())
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    state = xpp.checkpoint.State(stages=stage, optimizer=optimizer)
    text = error_text(lambda: xpp.checkpoint.load(state, f"{folder}/step-1"))
    xpp.checkpoint.load(run.state, f"{folder}/step-1")
    dist.destroy_process_group()
    return text


def test_another_model_is_refused_by_names_and_shapes(
    worlds: Worlds, tmp_path: Path
) -> None:
    args = (str(tmp_path),)
    texts = worlds.run(another_model, ranks=2, args=args, timeout_s=300)
    assert_one_error(texts, r"unexpected: .*blocks\.3\.up\.weight")
    assert "head.weight" in texts[0] and "missing" not in texts[0]
    assert "blocks.1.up.weight: expected [3, 3], got [16, 8]" in texts[0]


class Alike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2)


def equal_names(folder: str) -> str:
    dist.init_process_group("xla_pp")
    stage = xpp.PipelineStage(Alike(), dist.get_rank(), 2, xpp.device())
    state = xpp.checkpoint.State(stages=stage)
    text = error_text(lambda: xpp.checkpoint.save(state, folder))
    dist.destroy_process_group()
    return text


def test_stages_with_equal_names_are_refused(worlds: Worlds, tmp_path: Path) -> None:
    texts = worlds.run(equal_names, ranks=2, args=(str(tmp_path),))
    assert_one_error(texts, r"up\.weight is something of its own in stages 0 and 1")


def seconds(folder: str) -> list[str]:
    """Save twice at once; return what was refused, and what is there."""
    run = begin(folder)
    first = xpp.checkpoint.async_save(run.state, f"{folder}/step-2")
    text = ""
    if not all(run.state.rendezvous.exchange("done", first.done())):
        with pytest.raises(xpp.CheckpointError) as caught:
            xpp.checkpoint.async_save(
                run.state, f"{folder}/step-3", while_saving="refuse"
            )
        text = str(caught.value)
    xpp.checkpoint.async_save(run.state, f"{folder}/step-4", keep_last=2).result()
    with pytest.raises(ValueError, match="while_saving: expected 'wait' or 'refuse'"):
        xpp.checkpoint.async_save(run.state, folder, while_saving="no")
    with pytest.raises(ValueError, match="keep_last: expected 1 or more, got 0"):
        xpp.checkpoint.save(run.state, folder, keep_last=0)
    dist.destroy_process_group()
    return [text, *sorted(path.name for path in Path(folder).iterdir())]


def slow_write(folder: str) -> list[str]:
    """Let bytes take a while."""
    write = saving.Writer.write_data

    def slowly(*args: Any) -> Any:
        time.sleep(1.0)
        return write(*args)

    saving.Writer.write_data = slowly
    try:
        return seconds(folder)
    finally:
        saving.Writer.write_data = write


def test_a_second_save_waits_or_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    args = (str(tmp_path),)
    for text, *names in worlds.run(slow_write, ranks=2, args=args, timeout_s=300):
        assert "async_save: expected the save before to be done" in text
        assert names == ["step-2", "step-4"]


def leaves_at_once(folder: str) -> bool:
    """Destroy the group while bytes are written; return whether they are, after it."""
    run = begin(folder)
    write = saving.Writer.write_data

    def slowly(*args: Any) -> Any:
        time.sleep(1.0)
        return write(*args)

    saving.Writer.write_data = slowly
    try:
        future = xpp.checkpoint.async_save(run.state, f"{folder}/step-2")
        dist.destroy_process_group()
    finally:
        saving.Writer.write_data = write
    return future.done() and future.exception() is None


def test_a_group_is_destroyed_when_the_last_save_is_done(
    worlds: Worlds, tmp_path: Path
) -> None:
    args = (str(tmp_path),)
    assert worlds.run(leaves_at_once, ranks=2, args=args) == [True, True]
    assert xpp.checkpoint.latest(tmp_path) == tmp_path / "step-2"
