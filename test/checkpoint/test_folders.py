"""The last checkpoint that was finished is found, whatever came after it."""

from pathlib import Path

import pytest

from torch_xla_pp.checkpoint import folders, latest
from torch_xla_pp.errors import CheckpointError

pytestmark = pytest.mark.pure


def finished(path: Path, text: str = "") -> Path:
    path.mkdir(parents=True)
    (path / ".metadata").write_text(text)
    return path


def save(path: Path, text: str = "") -> None:
    (folders.begin(path) / ".metadata").write_text(text)
    folders.publish(path)


def text_of(path: Path | None) -> str:
    assert path is not None
    return (path / ".metadata").read_text()


def test_the_newest_has_the_largest_number(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    for name in ("step-9", "step-10", "best", "step-2"):
        finished(tmp_path / name)
    assert latest(tmp_path) == tmp_path / "step-10"


def test_only_a_folder_of_checkpoints_has_a_newest_one(tmp_path: Path) -> None:
    path = finished(tmp_path / "step-1")
    with pytest.raises(CheckpointError, match="expected a folder .* got a checkpoint"):
        latest(path)
    with pytest.raises(CheckpointError, match="expected a folder .* got a file"):
        latest(path / ".metadata")


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    for free in (tmp_path / "none", finished(tmp_path / "step-1")):
        folders.check_replaceable(free)
    with pytest.raises(CheckpointError, match="got a folder of other things, which"):
        folders.check_replaceable(tmp_path)
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(CheckpointError, match="got a file, which would be lost"):
        folders.check_replaceable(file)


def test_two_programs_do_not_write_one_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    hold = folders.Hold(folders.begin(path))
    (folders.partial_of(path) / "part").write_text("")
    # A lock is of an open file, so this is what another program would meet.
    with pytest.raises(CheckpointError, match="got another program that writes"):
        folders.begin(path)
    assert (folders.partial_of(path) / "part").exists()
    hold.release()
    assert not any(folders.begin(path).iterdir())


def test_what_is_not_finished_is_not_found(tmp_path: Path) -> None:
    finished(tmp_path / "step-1")
    (tmp_path / "step-2").mkdir()
    (folders.begin(tmp_path / "step-3") / ".metadata").write_text("")
    assert latest(str(tmp_path)) == tmp_path / "step-1"


def test_what_a_killed_save_has_left_goes_with_the_next(tmp_path: Path) -> None:
    (folders.begin(tmp_path / "step-1") / "part").write_text("")
    save(tmp_path / "step-1")
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert [path.name for path in (tmp_path / "step-1").iterdir()] == [".metadata"]


def test_one_takes_the_place_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step-1"
    save(path, "old")
    save(path, "new")
    assert text_of(path) == "new"
    assert latest(tmp_path) == path

    partial = folders.begin(path)
    (partial / ".metadata").write_text("newest")
    # Killed between the two renames.
    rename = Path.rename
    monkeypatch.setattr(
        Path,
        "rename",
        lambda own, to: 1 / 0 if own == partial else rename(own, to),
    )
    with pytest.raises(ZeroDivisionError):
        folders.publish(path)
    monkeypatch.undo()
    assert not path.exists()
    assert text_of(latest(tmp_path)) == "new"
    assert text_of(folders.existing(path)) == "new"
    save(path, "newest")
    assert latest(tmp_path) == path == folders.existing(path)
    assert [own.name for own in tmp_path.iterdir()] == ["step-1"]


def test_older_ones_are_dropped(tmp_path: Path) -> None:
    for number in range(5):
        finished(tmp_path / f"step-{number}")
    finished(tmp_path / "best")
    folders.keep(tmp_path / "step-4", 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step-3", "step-4", "best"}
    # The one that was just written stays even if others have larger numbers.
    folders.keep(tmp_path / "step-3", 1)
    assert {path.name for path in tmp_path.iterdir()} == {"step-3", "step-4", "best"}
