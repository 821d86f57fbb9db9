"""Weights in the format of Hugging Face's libraries: safetensors files with an index.

The library of that name reads and writes the files; the index lists the file of each
name. Of a tied parameter only the first name is in a file.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.checkpoint import folders
from torch_xla_pp.checkpoint.device_tensor import DeviceTensor, write
from torch_xla_pp.checkpoint.parts import Names, SavedStage, held_by, values_of
from torch_xla_pp.errors import CheckpointError
from torch_xla_pp.mesh import Box
from torch_xla_pp.transport import Rendezvous, of_group

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_safetensors(
    stages: SavedStage | Iterable[SavedStage],
    directory: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Fill stages from a directory of safetensors; all ranks must call it.

    Each device's part is read separately, so a rank has one tensor on the host. The
    model may be built under `deferred_init`. Values are cast to what parameters are.

    Args:
        stages: All stages of this rank, or the only one.
        directory: Contains the files of a model and their index, or `model.safetensors`
            alone.
        process_group: All ranks of the job, None for the default group.

    Raises:
        CheckpointError: Names are missing or unexpected, shapes differ, or a file
            cannot be read; all of it on every rank.

    Example:
        >>> load_safetensors(stages, "Llama-3.2-1B")
    """
    rendezvous = of_group(process_group).rendezvous
    path, own = Path(directory), _listed(stages)
    with rendezvous.reporting(f"loading {path}"), ExitStack() as stack:
        names = _agree(rendezvous, own)
        files = _files(path)
        readers = _Readers(path, files, stack)
        wanted = {
            name: (value, next((n for n in names.all_of(name) if n in files), None))
            for stage in own
            for name, value in values_of(stage).items()
            if isinstance(value, Tensor)
        }
        faults = [
            f"{name}: expected shape {list(value.shape)}, got {shape}"
            for name, (value, key) in wanted.items()
            if key is not None and (shape := readers.shape(key)) != list(value.shape)
        ]
        _compare(path, names, files, rendezvous.exchange("safetensors: shapes", faults))
        for stage in own:
            for value in values_of(stage).values():
                if isinstance(value, Tensor) and value.device.type == "xla":
                    xla_compat.materialize([value])
        for value, key in wanted.values():
            if key is not None:
                write(value, readers.parts(key))
        rendezvous.exchange("safetensors: read", None)


def save_safetensors(
    stages: SavedStage | Iterable[SavedStage],
    directory: str | os.PathLike[str],
    *,
    max_file_bytes: int = 5 * 2**30,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write the weights of a model so that transformers loads them.

    All ranks must call it. Each writes files of its own, whose tensors it has on the
    host, one file at a time. Other files in the directory stay, such as `config.json`.

    Args:
        stages: All stages of this rank, or the only one.
        directory: Made if it is not there, on storage that all ranks share.
        max_file_bytes: The largest size of a file, unless one tensor is larger.
        process_group: All ranks of the job, None for the default group.

    Raises:
        CheckpointError: It cannot be written, on every rank.
    """
    rendezvous = of_group(process_group).rendezvous
    path, own = Path(directory), _listed(stages)
    with rendezvous.reporting(f"saving {path}"):
        names = _agree(rendezvous, own)
        if rendezvous.rank == 0:
            _writing(path, lambda: folders.begin(path))
        values = _written_here(own, names)
        groups = [*_by_size(values, max_file_bytes)]
        counts = rendezvous.exchange("safetensors: files", len(groups))
        first, total = sum(counts[: rendezvous.rank]), sum(counts)
        index: dict[str, str] = {}
        for number, group in enumerate(groups, first + 1):
            file = f"model-{number:05}-of-{total:05}.safetensors"
            index |= dict.fromkeys(group, file)
            _writing(path, lambda g=group, f=file: _write_file(path, f, values, g))
        sizes = sum(value.num_bytes for value in values.values())
        exchanged = rendezvous.exchange("safetensors: written", (index, sizes))
        if rendezvous.rank == 0:
            _writing(path, lambda: _publish(path, exchanged))
        rendezvous.exchange("safetensors: published", None)


class _Readers:
    """The readers of tensors in files that stay open.

    Args:
        path: The folder.
        files: Name → file.
        stack: What closes them.
    """

    def __init__(self, path: Path, files: dict[str, str], stack: ExitStack) -> None:
        self._path, self._files, self._stack = path, files, stack
        self._open: dict[str, Any] = {}

    def shape(self, name: str) -> list[int]:
        """Return a tensor's shape."""
        return list(self._file(name).get_slice(name).get_shape())

    def parts(self, name: str) -> Any:
        """Return a function that returns a part of a tensor."""
        file = self._file(name)

        def read(box: Box) -> Tensor:
            if not box.sizes:
                return torch.as_tensor(file.get_tensor(name))
            return torch.as_tensor(file.get_slice(name)[box.slices])

        return read

    def _file(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            try:
                opened = _library().safe_open(self._path / file, framework="pt")
                self._open[file] = self._stack.enter_context(opened)
            except Exception as error:  # The library has its own errors.
                raise CheckpointError(
                    f"{self._path / file}: expected a readable safetensors file, got "
                    f"{error}. Fetch it again."
                ) from error
        return self._open[file]


def _library() -> ModuleType:
    """Return the library.

    Raises:
        CheckpointError: It is not installed.
    """
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError(
            f"safetensors: expected the library to be installed, got {error}. Install "
            "safetensors."
        ) from error
    return safetensors


def _listed(stages: SavedStage | Iterable[SavedStage]) -> list[SavedStage]:
    return list(stages) if isinstance(stages, Iterable) else [stages]


def _agree(rendezvous: Rendezvous, stages: Sequence[SavedStage]) -> Names:
    exchanged = rendezvous.exchange("safetensors: names", [held_by(s) for s in stages])
    return Names.of(part for parts in exchanged for part in parts)


def _files(path: Path) -> dict[str, str]:
    """Return name → file."""
    try:
        if (path / _INDEX).exists():
            found: dict[str, str] = json.loads((path / _INDEX).read_text())[
                "weight_map"
            ]
            return found
        with _library().safe_open(path / _SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), _SINGLE)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: expected {_INDEX} or {_SINGLE}, got {error}. Pass a directory "
            "of a model's weights."
        ) from error


def _compare(
    path: Path, names: Names, files: dict[str, str], shapes: list[list[str]]
) -> None:
    """Refuse another model.

    Raises:
        CheckpointError: Lists all that differs.
    """
    known = {other for name in names.shapes for other in names.all_of(name)}
    missing = [
        name
        for name, shape in names.shapes.items()
        if shape is not None and not any(n in files for n in names.all_of(name))
    ]
    unexpected = [name for name in files if name not in known]
    other = list(dict.fromkeys(text for own in shapes for text in own))
    faults = [
        *([f"missing: {', '.join(missing)}"] if missing else []),
        *([f"unexpected: {', '.join(unexpected)}"] if unexpected else []),
        *([f"other shapes: {'; '.join(other)}"] if other else []),
    ]
    if faults:
        raise CheckpointError(
            f"{path}: expected weights of this model, got others: {'. '.join(faults)}. "
            "Build the model that they are of."
        )


def _written_here(
    stages: Sequence[SavedStage], names: Names
) -> dict[str, DeviceTensor]:
    """Return what this rank writes: replicas take turns, buffers are of the first."""
    found: dict[str, DeviceTensor] = {}
    for stage in stages:
        replica, count = stage.replica
        values = values_of(stage)
        tensors = {n: v for n, v in values.items() if isinstance(v, Tensor)}
        xla_compat.materialize([v for v in tensors.values() if v.device.type == "xla"])
        for number, (name, value) in enumerate(tensors.items()):
            is_owner = names.owners[name] == stage.stage_index
            turn = number % count if isinstance(value, torch.nn.Parameter) else 0
            if is_owner and names.first_of(name) == name and turn == replica:
                found[name] = DeviceTensor(value)
    return found


def _by_size(values: dict[str, DeviceTensor], most: int) -> Iterator[list[str]]:
    """Yield names for each file."""
    group: list[str] = []
    size = 0
    for name, value in values.items():
        if group and size + value.num_bytes > most:
            yield group
            group, size = [], 0
        group.append(name)
        size += value.num_bytes
    if group:
        yield group


def _write_file(
    path: Path, file: str, values: dict[str, DeviceTensor], names: Sequence[str]
) -> None:
    tensors = {name: _whole(values[name]) for name in names}
    target = folders.partial_of(path) / file
    _library().torch.save_file(tensors, target, metadata={"format": "pt"})
    with target.open("rb") as written:
        os.fsync(written.fileno())


def _whole(value: DeviceTensor) -> Tensor:
    parts, boxes = value.parts(), value.boxes()
    if len(parts) == 1:
        return next(iter(parts.values())).contiguous()
    whole = torch.empty(value.shape, dtype=value.dtype)
    for offset, part in parts.items():
        whole[boxes[offset].slices] = part
    return whole


def _publish(path: Path, written: list[tuple[dict[str, str], int]]) -> None:
    """Rename files over older ones; the index last."""
    index = {name: file for own, _ in written for name, file in own.items()}
    total = sum(size for _, size in written)
    partial = folders.partial_of(path)
    text = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(index.items())),
    }
    (partial / _INDEX).write_text(json.dumps(text, indent=2) + "\n")
    path.mkdir(parents=True, exist_ok=True)
    files = sorted(set(index.values()))
    old = {own.name for own in path.glob("model*.safetensors")} - set(files)
    for file in (*files, _INDEX):
        (partial / file).replace(path / file)
    for file in old:
        (path / file).unlink()
    folders.drop(path)


def _writing(path: Path, function: Any) -> None:
    try:
        function()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: expected to write it, got {type(error).__name__}: {error}. Look "
            "at the storage."
        ) from error
