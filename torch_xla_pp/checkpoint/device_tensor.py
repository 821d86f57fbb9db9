"""Tensors as torch.distributed.checkpoint sees them: parts of a whole.

Law: a shard is read as a shard. Nothing is gathered, on a device or on the host, and a
part that several devices hold is read from the first of them.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torch_xla_pp import xla_compat
from torch_xla_pp.mesh import Box, Tiling
from torch_xla_pp.transport import ShardLayout

Offset = tuple[int, ...]


class DeviceTensor:
    """The parts of a tensor that this rank has, as a planner sees them.

    A rank has all of it, in one part on the host or in one for each tile that its
    devices hold. Deep copies are on the host.

    Args:
        tensor: On the host, or device data.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self._tiling = tiling_of(tensor)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def boxes(self) -> dict[Offset, Box]:
        """Return the parts by where they begin."""
        found = [self._tiling.box(tile) for tile in sorted(set(self._tiling.tiles))]
        return {box.start: box for box in found if box.num_elements} or {
            box.start: box for box in found[:1]
        }

    @property
    def tensor(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: It was dropped.
        """
        if self._tensor is None:
            raise RuntimeError("the tensor was dropped when it was read")
        return self._tensor

    @property
    def is_on_devices(self) -> bool:
        """Return whether the tensor is on the devices."""
        return self.tensor.device.type == "xla"

    def parts(self) -> dict[Offset, Tensor]:
        """Return the parts on the host, by where they begin; any thread may call.

        The parts of a tensor on the host share its memory.
        """
        shards = xla_compat.read_ready(self.tensor) if self.is_on_devices else []
        boxes = self.boxes()
        if len(shards) < 2:
            whole = shards[0] if shards else self.tensor.detach()
            return {offset: whole[box.slices] for offset, box in boxes.items()}
        tiles = self._tiling.tiles
        found = {}
        for offset, box in boxes.items():
            device = tiles.index(self._tiling.tile_at(offset))
            found[offset] = shards[device][tuple(map(slice, box.sizes))]
        return found

    def stage(self, copied: Tensor) -> None:
        """Replace the tensor by a copy; the original may change from now on."""
        self._tensor = copied

    def drop(self) -> None:
        """Forget the tensor."""
        self._tensor = None

    def __deepcopy__(self, memo: object) -> "DeviceTensor":
        whole = torch.empty(self.shape, dtype=self.dtype)
        boxes = self.boxes()
        for offset, part in self.parts().items():
            whole[boxes[offset].slices] = part
        copied = DeviceTensor(self.tensor)
        copied.stage(whole)
        return copied

    def __create_write_items__(  # torch's protocol
        self, fqn: str, _: object
    ) -> list[WriteItem]:
        size = torch.Size(self.shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(
                        offsets=torch.Size(offset), sizes=torch.Size(box.sizes)
                    ),
                    properties=TensorProperties(dtype=self.dtype),
                    size=size,
                ),
            )
            for offset, box in self.boxes().items()
        ]


class Whole:
    """A value that is kept in one piece, such as a mapping whose keys are not texts.

    A file has the value itself.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self._value,)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Whole":
        return Whole(copy.deepcopy(self._value, memo))


def tiling_of(tensor: Tensor) -> Tiling:
    """Return which part of a tensor each device of this rank holds."""
    if tensor.device.type == "xla":
        return ShardLayout.of_tensor(tensor).tiling
    return Tiling(shape=tuple(tensor.shape), grid=(1,) * tensor.dim(), tiles=(0,))


def write(tensor: Tensor, read: Callable[[Box], Tensor]) -> None:
    """Write a value into `tensor`; each device gets its part.

    Args:
        tensor: A parameter, buffer or the like, on devices or on the host. What is not
            annotated becomes replicated.
        read: Returns a part of the value, on the host; cast if its dtype differs.
    """
    if tensor.device.type == "xla":
        xla_compat.replace_value(tensor, _uploaded(read, tensor))
        return
    with torch.no_grad():
        tensor.copy_(read(tiling_of(tensor).box(0)))


def parts_of(value: Tensor) -> Callable[[Box], Tensor]:
    """Return a function that returns parts of a value."""
    return lambda box: value[box.slices]


def uploaded(value: Tensor, like: Tensor) -> Tensor:
    """Return a value of the host as device data, sharded as `like`.

    A value of another shape than `like` is replicated.
    """
    if value.shape != like.shape:
        return xla_compat.replicate(value.contiguous())
    return _uploaded(parts_of(value), like, value.dtype)


def _uploaded(
    read: Callable[[Box], Tensor], like: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    tiling = tiling_of(like)
    shards: dict[int, Tensor] = {}
    for tile in tiling.tiles:
        if tile not in shards:
            part = read(tiling.box(tile)).to(dtype or like.dtype)
            shards[tile] = _padded(part, tiling.shard_shape)
    if xla_compat.is_replicated(like):
        return xla_compat.replicate(shards[0])
    return xla_compat.from_local_shards(
        [shards[tile] for tile in tiling.tiles],
        xla_compat.sharding_of(like),
        tiling.shape,
    )


def _padded(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    if part.shape == shape:
        return part.contiguous()
    whole = part.new_zeros(shape)
    whole[tuple(map(slice, part.shape))] = part
    return whole
