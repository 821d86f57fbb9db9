"""Files of a checkpoint: torch's own, with checksums.

torch.distributed.checkpoint puts one `torch.save` after another into a file. Each is a
zip file, in which the data of a tensor has a checksum that torch writes but does not
check. The rest of the zip file has none: its checksum is kept beside its place in the
checkpoint's metadata, and that of the metadata in a file that `sha256sum -c` reads.
"""

import gc
import hashlib
import io
import os
import pickle
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torch_xla_pp.errors import CheckpointError

METADATA = ".metadata"
_SUMS = "SHA256SUMS"
_CHECKSUM = "rest_crc32"
_LARGE_BYTES = 1 << 16
_LOCAL_HEADER_BYTES = 30


class Writer(FileSystemWriter):
    """A writer of checkpoints with checksums.

    A rank writes one file, one tensor after the other. torch's own loop keeps all that
    it has written until the file is closed, which would hold a whole stage on the host.

    Args:
        path: A folder, made if it is not there.
    """

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[WriteResult]]:
        """Write this rank's file, what is no tensor first."""
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        items = sorted(plan.items, key=lambda i: i.type != WriteItemType.BYTE_IO)
        results = []
        path = Path(self.path) / name
        if items:
            with path.open("wb") as stream:
                results = [_write(i, planner, stream, name) for i in items]
                stream.flush()
                os.fsync(stream.fileno())
            with path.open("rb") as file:
                for result in results:
                    place = result.storage_data
                    view = _View(file, place.offset, place.length)
                    setattr(place, _CHECKSUM, _rest_checksum(view, place.length))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, and its checksum."""
        super().finish(metadata, results)
        folder = Path(self.path)
        digest = hashlib.sha256((folder / METADATA).read_bytes()).hexdigest()
        with (folder / _SUMS).open("w") as file:
            file.write(f"{digest}  {METADATA}\n")
            file.flush()
            os.fsync(file.fileno())


class Reader(FileSystemReader):
    """A reader of checkpoints, which reads a part once and refuses damaged files.

    Attributes:
        num_bytes: Bytes of parts that were read.
    """

    num_bytes = 0

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata.

        Raises:
            CheckpointError: It is not there, or damaged.
        """
        folder = Path(self.path)
        file, sums = folder / METADATA, folder / _SUMS
        try:
            data = file.read_bytes()
            lines = sums.read_text().splitlines() if sums.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{folder}: expected a checkpoint of torch.distributed.checkpoint, got "
                f"{error}. Pass a folder that has a file {METADATA}, e.g. what latest "
                "returns."
            ) from error
        digest = hashlib.sha256(data).hexdigest()
        if sums.exists() and f"{digest}  {METADATA}" not in lines:
            raise _damaged(file, f"its SHA-256 is not the one in {_SUMS}")
        try:
            metadata: Metadata = pickle.loads(data)
        except Exception as error:
            raise _damaged(file, str(error)) from error
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for.

        Raises:
            CheckpointError: A file is not there, or damaged.
        """
        if any(_has_transforms(self.storage_data[i.storage_index]) for i in plan.items):
            return super().read_data(plan, planner)
        for name, parts in _by_file(plan.items, self.storage_data).items():
            path = Path(self.path) / name
            try:
                with path.open("rb") as file:
                    for (offset, length, checksum), items in sorted(
                        parts.items(), key=lambda part: part[0][0]
                    ):
                        file.seek(offset)
                        data = file.read(length)
                        self.num_bytes += len(data)
                        _check(path, data, length, checksum)
                        _give(path, data, items, planner)
            except OSError as error:
                raise CheckpointError(
                    f"{path}: expected a readable file, got {error}. Look at the "
                    "storage, or load another checkpoint."
                ) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _View(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file, self._start, self._length = file, offset, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}
        self._position = base[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        self._file.seek(self._start + self._position)
        data = self._file.read(left if size < 0 else min(size, left))
        self._position += len(data)
        return data


def _write(
    item: WriteItem, planner: SavePlanner, stream: IO[bytes], name: str
) -> WriteResult:
    """Write one part behind the others."""
    offset = stream.tell()
    value = planner.resolve_data(item)
    if isinstance(value, io.BytesIO):
        stream.write(value.getbuffer())
    else:
        tensor = value.detach().cpu()
        is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
        torch.save(tensor.clone() if is_part else tensor, stream)
        if tensor.nbytes >= _LARGE_BYTES:
            # torch.save defines a class at each call, in a cycle that refers to all
            # that was saved: without this it would stay until Python collects garbage.
            gc.collect(1)
    length = stream.tell() - offset
    return WriteResult(
        index=item.index,
        size_in_bytes=length,
        storage_data=_StorageInfo(name, offset, length),
    )


def _by_file(
    items: list[ReadItem], places: dict[Any, Any]
) -> dict[str, dict[tuple[int, int, int | None], list[ReadItem]]]:
    """Return file → where a part begins, its length and checksum → requests for it."""
    found: dict[str, dict[tuple[int, int, int | None], list[ReadItem]]] = {}
    for item in items:
        place = places[item.storage_index]
        part = place.offset, place.length, getattr(place, _CHECKSUM, None)
        found.setdefault(place.relative_path, {}).setdefault(part, []).append(item)
    return found


def _has_transforms(place: Any) -> bool:
    return bool(getattr(place, "transform_descriptors", None))


def _give(path: Path, data: bytes, items: list[ReadItem], planner: LoadPlanner) -> None:
    """Pass a part to every request for it."""
    if items[0].type == LoadItemType.BYTE_IO:
        for item in items:
            planner.load_bytes(item, io.BytesIO(data))
        return
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise _damaged(path, str(error)) from error
    for item in items:
        part = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
        target = planner.resolve_tensor(item).detach()
        target.copy_(part)
        planner.commit_tensor(item, target)


def _check(path: Path, data: bytes, length: int, checksum: int | None) -> None:
    """Refuse a part that differs from what was written.

    Raises:
        CheckpointError: Names the file.
    """
    if len(data) < length:
        raise _damaged(path, "it ends too early")
    try:
        found = _rest_checksum(io.BytesIO(data), length)
        if checksum is not None and found != checksum:
            raise _damaged(path, "a checksum does not match")
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if (name := archive.testzip()) is not None:
                raise _damaged(path, f"the checksum of {name} does not match")
    except CheckpointError:
        raise
    except Exception as error:  # Of many kinds, if it is no zip file.
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: expected the file that was written, got a damaged one: {reason}. "
        "Load another checkpoint."
    )


def _rest_checksum(view: Any, length: int) -> int:
    """Return a checksum of a zip file without the data of its large entries."""
    found, position = 0, 0
    for start, end in [*_large_entries(view), (length, length)]:
        view.seek(position)
        found = zlib.crc32(view.read(start - position), found)
        position = end
    return found


def _large_entries(view: Any) -> Iterator[tuple[int, int]]:
    """Yield where the data of large entries begin and end."""
    with zipfile.ZipFile(view) as archive:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    for entry in entries:
        if entry.compress_size < _LARGE_BYTES:
            continue
        view.seek(entry.header_offset)
        header = view.read(_LOCAL_HEADER_BYTES)
        # The lengths of the name and of what pads the data.
        names = int.from_bytes(header[26:28], "little")
        names += int.from_bytes(header[28:30], "little")
        start = entry.header_offset + _LOCAL_HEADER_BYTES + names
        yield start, start + entry.compress_size
