"""Folders of checkpoints: written beside, renamed when whole, and dropped when old.

Law: at any moment the last checkpoint that was finished is on disk under its name, or,
while another one takes its place, beside it.
"""

import contextlib
import fcntl
import os
import re
import shutil
from pathlib import Path

from torch_xla_pp.checkpoint.storage import METADATA
from torch_xla_pp.errors import CheckpointError

_NUMBER = re.compile(r"(\d+)\D*$")
_PARTIAL, _REPLACED = ".partial", ".replaced"


def partial_of(path: Path) -> Path:
    """Return where a checkpoint is written before it is whole."""
    return path.with_name(f".{path.name}{_PARTIAL}")


def begin(path: Path) -> Path:
    """Make an empty folder for a checkpoint; removes what a killed save has left.

    Raises:
        CheckpointError: Another program is writing one.
    """
    partial = partial_of(path)
    if partial.exists():
        Hold(partial).release()
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def check_replaceable(path: Path) -> None:
    """Refuse to replace anything but a checkpoint by a checkpoint.

    Raises:
        CheckpointError: There is something else.
    """
    if not path.exists() or (path / METADATA).exists():
        return
    if not path.is_dir() or any(path.iterdir()):
        kind = "a folder of other things" if path.is_dir() else "a file"
        raise CheckpointError(
            f"{path}: expected a checkpoint, an empty folder or nothing there, got "
            f"{kind}, which would be lost. Give the checkpoint a name of its own, e.g. "
            f"{path / 'step-1'}."
        )


class Hold:
    """A lock on a folder that is being written; ends with the process.

    Args:
        partial: The folder, see `begin`.

    Raises:
        CheckpointError: Another program holds it.
    """

    def __init__(self, partial: Path) -> None:
        self._descriptor: int | None = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise CheckpointError(
                f"{partial}: expected to write alone, got another program that writes. "
                "Wait for it, or save under another name."
            ) from None
        except OSError:  # Some shared storage has no locks.
            self.release()

    def release(self) -> None:
        """Let other programs write there."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            # Processes that were forked in between have it open, too.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def drop(path: Path) -> None:
    """Remove what a save that failed has written."""
    shutil.rmtree(partial_of(path), ignore_errors=True)


def publish(path: Path) -> None:
    """Rename a complete checkpoint to its final name."""
    partial, old = partial_of(path), path.with_name(f".{path.name}{_REPLACED}")
    _sync(partial)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    partial.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def keep(path: Path, count: int) -> None:
    """Remove the older ones of the checkpoints beside one, which counts, too.

    Only folders with a number in their name count.
    """
    for old in _numbered(path.parent)[:-count]:
        if old != path:
            shutil.rmtree(old, ignore_errors=True)


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint in a folder of checkpoints, None if there is none.

    The newest is the one with the largest number at the end of its name, as in
    "step-500". Those that were not finished do not count.

    Args:
        path: The folder, which need not be there.

    Raises:
        CheckpointError: It is a file, or a checkpoint.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or (path / METADATA).exists()):
        kind = "a checkpoint" if path.is_dir() else "a file"
        raise CheckpointError(
            f"{path}: expected a folder of checkpoints, got {kind}. Pass the folder "
            "that it is in."
        )
    found = _numbered(path)
    return found[-1] if found else None


def existing(path: str | os.PathLike[str]) -> Path:
    """Return where a checkpoint is that was saved under a name."""
    path = Path(path)
    old = path.with_name(f".{path.name}{_REPLACED}")
    return old if not path.exists() and old.exists() else path


def _numbered(folder: Path) -> list[Path]:
    """Return the finished checkpoints in a folder that have a number, in order."""
    found: dict[str, tuple[int, Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = path.name
        if name.startswith("."):
            if not name.endswith(_REPLACED):
                continue
            name = name[1 : -len(_REPLACED)]
        number = _NUMBER.search(name)
        if number and (path / METADATA).exists():
            # A checkpoint under its own name, which is listed later, replaces another.
            found[name] = int(number[1]), path
    return [path for _, path in sorted(found.values())]


def _sync(folder: Path) -> None:
    """Flush the entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
