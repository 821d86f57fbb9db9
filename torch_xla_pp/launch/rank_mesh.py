"""The mesh of one rank's devices, for scripts of torch_xla and of torch."""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
import torch_xla.distributed.spmd as xs


class _Sizes(tuple[int, ...]):
    """The sizes of axes, as torch's `mesh.shape`; may be called, as torch_xla's."""

    names: tuple[str, ...]

    def __call__(self) -> "OrderedDict[str, int]":
        return OrderedDict(zip(self.names, self, strict=True))


class RankMesh(xs.Mesh):  # type: ignore[misc]  # torch_xla has no types
    """Some axes of one rank's devices; made by slicing what `init_device_mesh` returns.

    To torch_xla it is a mesh over all devices of the rank, in which the named axes come
    first, so that `mark_sharding` and stages accept any slice. To scripts for torch's
    `DeviceMesh` it has the named axes alone. Its axes have no process groups: XLA puts
    the collectives into the programs.

    Args:
        devices: Ids of the rank's devices, a dimension for each axis.
        axes: Name of every axis.
        named: The axes that were named, which come first.

    Attributes:
        whole: The mesh of all axes.
    """

    device_type = "xla"

    def __init__(
        self, devices: "np.ndarray[Any, Any]", axes: Sequence[str], named: Sequence[str]
    ) -> None:
        order = [*named, *(axis for axis in axes if axis not in named)]
        turned = devices.transpose([list(axes).index(axis) for axis in order])
        self._named = tuple(order)
        self._sizes = tuple(turned.shape)
        super().__init__(turned.flatten(), turned.shape, tuple(order))
        self.whole = self
        if len(order) > len(named):
            self.whole = RankMesh(turned, order, order)
            self._named = tuple(named)
            self._sizes = tuple(turned.shape[: len(named)])

    def __repr__(self) -> str:
        axes = zip(self._named, self._sizes, strict=True)
        return f"RankMesh({' x '.join(f'{name}={size}' for name, size in axes)})"

    __str__ = __repr__

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Return the names of the axes."""
        return self._named

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self._named)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the sizes of the axes."""
        found = _Sizes(self._sizes)
        found.names = self._named
        return found

    @property
    def mesh(self) -> torch.Tensor:
        """Return ids of devices, a dimension for each named axis."""
        ids = self.get_logical_mesh()
        return torch.from_numpy(ids[(..., *[0] * (ids.ndim - self.ndim))])

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the size of one axis, or of all that were named."""
        return math.prod(self._sizes) if mesh_dim is None else self._sizes[mesh_dim]

    def get_op_sharding(self, partition_spec: Any) -> Any:
        """Return torch_xla's sharding for a partition."""
        if self.whole is self:
            return super().get_op_sharding(partition_spec)
        return self.whole.get_op_sharding(partition_spec)

    def __getitem__(self, names: str | tuple[str, ...]) -> "RankMesh":
        """Return the mesh of some of the axes.

        Raises:
            ValueError: It has no such axis.
        """
        wanted = named_axes(names, self._named)
        return RankMesh(self.get_logical_mesh(), self.axis_names, wanted)

    def _flatten(self, mesh_dim_name: str | None = None) -> "RankMesh":
        """Return the mesh in which all named axes are one.

        Args:
            mesh_dim_name: Its name; None for the names of the axes, joined by "_".
        """
        name = mesh_dim_name or "_".join(self._named)
        ids = self.get_logical_mesh()
        others = self.axis_names[self.ndim :]
        joined = ids.reshape(self.size(), *ids.shape[self.ndim :])
        return RankMesh(joined, (name, *others), (name,))

    def get_group(self, mesh_dim: str | int | None = None) -> NoReturn:
        """Refuse: an axis over devices has no process group."""
        self._refuse("get_group")

    def get_local_rank(self, mesh_dim: str | int | None = None) -> NoReturn:
        """Refuse: a process is on all devices of the axis."""
        self._refuse("get_local_rank")

    def get_coordinate(self) -> NoReturn:
        """Refuse, likewise."""
        self._refuse("get_coordinate")

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"{what}: expected an axis over processes, got {self}: its devices belong "
            "to one process, and XLA puts the collectives into the programs. Shard by "
            "rules in place of what needs groups: presets.fsdp for fully_shard, "
            "presets.dp for replicate, presets.tp and presets.tensor_sequence for "
            "styles of parallelize_module, presets.cp for context_parallel, as "
            "sharding=... of the stage."
        )


def rank_mesh(axes: Mapping[str, int]) -> RankMesh:
    """Make the mesh of all axes over this rank's devices.

    Args:
        axes: Name → size.
    """
    devices = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
    return RankMesh(devices, tuple(axes), tuple(axes))


def named_axes(names: str | tuple[str, ...], axes: Sequence[str]) -> tuple[str, ...]:
    """Return the names by which a mesh of `axes` is sliced.

    Raises:
        ValueError: There is no such axis, or one is named twice.
    """
    wanted = (names,) if isinstance(names, str) else tuple(names)
    if not wanted or {*wanted} - {*axes} or len(set(wanted)) < len(wanted):
        raise ValueError(
            f"mesh{list(wanted)}: expected different ones of {axes}. Name axes of this "
            "mesh."
        )
    return wanted
