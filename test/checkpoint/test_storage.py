"""A file that is not what was written is refused, with its name."""

import random
import subprocess
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.metadata import MetadataIndex

import torch_xla_pp as xpp
from torch_xla_pp.checkpoint.storage import Reader, Writer

pytestmark = [
    pytest.mark.pure,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

VALUES = {"large": torch.arange(40_000.0), "small": torch.arange(3), "text": "abc"}
DATA = "__0_0.distcp"


def room() -> dict[str, Any]:
    return {"large": torch.zeros(40_000), "small": torch.zeros(3).long(), "text": ""}


def load(folder: Path) -> dict[str, Any]:
    found = room()
    reader, planner = Reader(folder), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(found, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.create_local_plan(), planner)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(dict(VALUES), storage_writer=Writer(tmp_path), no_dist=True)
    return tmp_path


def test_what_was_written_is_read(folder: Path) -> None:
    found = load(folder)
    assert torch.equal(found["large"], VALUES["large"])
    assert torch.equal(found["small"], VALUES["small"])
    assert found["text"] == "abc"
    theirs = room()
    dcp.load(theirs, checkpoint_id=folder, no_dist=True)
    assert torch.equal(theirs["large"], VALUES["large"])
    subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=folder, check=True)


@pytest.mark.parametrize("name", [DATA, ".metadata"])
def test_any_flipped_bit_is_seen(folder: Path, name: str) -> None:
    good = (folder / name).read_bytes()
    chosen = random.Random(0)
    # What is no data of a large tensor is at both ends.
    places = [*range(0, 3000, 17), *range(len(good) - 6000, len(good), 17)]
    places += [chosen.randrange(len(good)) for _ in range(60)]
    for place in [p for p in places if 0 <= p < len(good)]:
        bad = bytearray(good)
        bad[place] ^= 1 << chosen.randrange(8)
        (folder / name).write_bytes(bad)
        with pytest.raises(xpp.CheckpointError, match=f"{name}: expected .* damaged"):
            load(folder)


@pytest.mark.parametrize("name", [DATA, ".metadata"])
def test_a_truncated_file_is_seen(folder: Path, name: str) -> None:
    good = (folder / name).read_bytes()
    for length in (0, 1, len(good) // 2, len(good) - 1):
        (folder / name).write_bytes(good[:length])
        with pytest.raises(xpp.CheckpointError, match=f"{name}: expected .* damaged"):
            load(folder)


def test_a_file_that_is_not_there_is_named(folder: Path) -> None:
    (folder / DATA).unlink()
    with pytest.raises(xpp.CheckpointError, match=f"{DATA}: expected a readable file"):
        load(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(xpp.CheckpointError, match="expected a checkpoint of torch"):
        load(folder)


class Reading(DefaultSavePlanner):
    """A planner that reads a tensor when asked, and notes which ones are still held."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[weakref.ref[Any]] = []
        self.alive: list[int] = []

    def lookup_object(self, index: MetadataIndex) -> Any:
        self.alive.append(sum(array() is not None for array in self.read))
        array = super().lookup_object(index).numpy().copy()
        self.read.append(weakref.ref(array))
        return torch.from_numpy(array)


def test_a_tensor_is_dropped_before_the_next_is_read(tmp_path: Path) -> None:
    planner = Reading()
    values = {str(index): torch.full((20_000,), float(index)) for index in range(4)}
    dcp.save(values, storage_writer=Writer(tmp_path), planner=planner, no_dist=True)
    assert planner.alive == [0, 0, 0, 0]
    found = {name: torch.zeros(20_000) for name in values}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(found[name], value) for name, value in values.items())


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # Of torch's writer.
def test_flipped_data_of_others_is_seen_too(tmp_path: Path) -> None:
    """torch writes a checksum of data, and does not look at it."""
    dcp.save(dict(VALUES), checkpoint_id=tmp_path, no_dist=True)
    data = bytearray((tmp_path / DATA).read_bytes())
    data[len(data) // 2] ^= 4
    (tmp_path / DATA).write_bytes(data)
    dcp.load(room(), checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(xpp.CheckpointError, match="checksum of .* does not match"):
        load(tmp_path)
