"""The devices of one rank as named axes, and values sharded over them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_xla_pp.text import type_text

Axis = str | tuple[str, ...] | None
Partition = tuple[Axis, ...]
LogicalAxes = tuple[str | None, ...]


def axis_names(axis: Axis) -> tuple[str, ...]:
    """Return the mesh axes that split a dimension, none for None."""
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else axis


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalMesh:
    """The named axes of one rank's devices.

    A *partition* of a tensor names, for each of its dimensions, the mesh axis (or
    axes) that the dimension is split over; None leaves it whole.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        axes = zip(self.names, self.shape, strict=True)
        return " x ".join(f"{name}={size}" for name, size in axes)

    @property
    def num_devices(self) -> int:
        """Return the number of devices of the mesh."""
        return math.prod(self.shape)

    def axis_size(self, axis: Axis) -> int:
        """Return the number of devices over which `axis` splits a dimension."""
        sizes = dict(zip(self.names, self.shape, strict=True))
        return math.prod(sizes[name] for name in axis_names(axis))

    def shard_shape(self, shape: tuple[int, ...], partition: Partition) -> list[int]:
        """Return the shape of one device's part of a tensor, padding included."""
        return [
            -(-size // self.axis_size(axis))
            for size, axis in zip(shape, partition, strict=True)
        ]

    def part(
        self, value: torch.Tensor, partition: Partition, place: Mapping[str, int]
    ) -> torch.Tensor:
        """Return the part of a value that one device holds, without a copy.

        Args:
            value: The value; its sizes divide over the axes that split them.
            partition: How it is sharded.
            place: The device's index along each axis.
        """
        for dim, axis in enumerate(partition):
            index = 0
            for name in axis_names(axis):
                index = index * self.axis_size(name) + place[name]
            value = value.chunk(self.axis_size(axis), dim)[index]
        return value

    def is_split(self, partition: Partition) -> bool:
        """Return whether `partition` splits anything over more than one device."""
        if self.num_devices == 1:
            return False
        return any(self.axis_size(axis) > 1 for axis in partition)

    def faults(self, shape: tuple[int, ...], partition: Partition) -> list[str]:
        """List what does not fit between a tensor's shape and its partition."""
        if len(partition) != len(shape):
            return [f"expected {len(shape)} entries, one per dimension"]
        used = [name for axis in partition for name in axis_names(axis)]
        found = [
            f"unknown axis {name!r}, the mesh has {self.names}"
            for name in used
            if name not in self.names
        ]
        found += [
            f"axis {name!r} is used twice"
            for name in sorted(set(used))
            if used.count(name) > 1
        ]
        if found:
            return found
        return [
            f"dimension {dim} of size {size} does not divide over {axis!r} of size "
            f"{self.axis_size(axis)}"
            for dim, (size, axis) in enumerate(zip(shape, partition, strict=True))
            if size % self.axis_size(axis)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A value on a boundary between two stages, without its data.

    Args:
        shape: Shape of the whole value.
        dtype: Its dtype.
        partition: How it is sharded over the devices of a rank.
        requires_grad: Whether its receiver sends a gradient back.
        axes: The logical axes that `shard` gave its dimensions, None if it has none. A
            rank with another mesh or other rules shards the value by these.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    partition: Partition
    requires_grad: bool = False
    axes: LogicalAxes | None = None

    @classmethod
    def of(
        cls,
        value: Tensor,
        partition: Partition,
        requires_grad: bool,
        axes: LogicalAxes | None = None,
    ) -> "TensorSpec":
        """Describe a value by its metadata."""
        return cls(
            shape=tuple(value.shape),
            dtype=value.dtype,
            partition=partition,
            requires_grad=requires_grad,
            axes=axes,
        )

    def shard_bytes(self, mesh: LocalMesh) -> int:
        """Return the bytes of one device's part."""
        shape = mesh.shard_shape(self.shape, self.partition)
        return math.prod(shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return type_text(self.shape, self.dtype)
