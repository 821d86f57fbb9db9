"""The mesh of a whole job: one process axis and the axes of each rank's devices.

Ranks come from torch.distributed. torch_xla sees every process as a world of its own,
so its rank and world size say nothing about the job.
"""

from typing import Any

import numpy as np
import torch.distributed as dist
import torch_xla.distributed.spmd as xs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as _init_torch_mesh

from torch_xla_pp import xla_compat
from torch_xla_pp.launch.device import device
from torch_xla_pp.mesh import MeshLayout, launch_hint
from torch_xla_pp.transport import of_group


class PipelineMesh:
    """Combine a mesh over ranks with a mesh over each rank's devices.

    The first axis counts ranks and behaves as one of `torch.distributed`'s meshes:
    `get_group`, `get_local_rank`, `mesh["pp"]`. The other axes count the devices of a
    rank: slicing them gives the SPMD mesh that torch_xla's `mark_sharding` takes.

    Example:
        >>> mesh = init_device_mesh("xla", (2, 2, 2),
        ...                         mesh_dim_names=("pp", "data", "model"))
        >>> mesh["data", "model"].mesh_shape
        (2, 2)
    """

    device_type = "xla"

    def __init__(self, layout: MeshLayout, processes: DeviceMesh) -> None:
        self._layout = layout
        self._processes = processes
        count = layout.num_local_devices
        self._local: dict[tuple[str, ...], Any] = {}
        self._devices = np.arange(count).reshape(layout.shape[1:])

    def __repr__(self) -> str:
        return f"PipelineMesh({self._layout})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the size of every axis."""
        return self._layout.shape

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self._layout.shape)

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Return the name of every axis."""
        return self._layout.names

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the size of one axis, or of the whole mesh."""
        shape = self._layout.shape
        return int(np.prod(shape)) if mesh_dim is None else shape[mesh_dim]

    def get_group(self, mesh_dim: str | int | None = None) -> dist.ProcessGroup:
        """Return the process group of the process axis.

        Raises:
            ValueError: `mesh_dim` is a local axis, which has no process group.
        """
        self._check_process_axis("get_group", mesh_dim)
        return self._processes.get_group()

    def get_local_rank(self, mesh_dim: str | int | None = None) -> int:
        """Return this process's position on the process axis.

        Raises:
            ValueError: `mesh_dim` is a local axis.
        """
        self._check_process_axis("get_local_rank", mesh_dim)
        return self._processes.get_local_rank()

    def __getitem__(self, names: str | tuple[str, ...]) -> Any:
        """Return the mesh of the named axes.

        Args:
            names: The process axis, for a `DeviceMesh` over ranks; or all local axes
                in any order, for a torch_xla SPMD mesh over this rank's devices.

        Raises:
            ValueError: The names are neither.
        """
        wanted = (names,) if isinstance(names, str) else tuple(names)
        if wanted == self._layout.names[:1]:
            return self._processes
        local = self._layout.names[1:]
        if sorted(wanted) != sorted(local):
            raise ValueError(
                f"mesh{list(wanted)}: expected the process axis "
                f"{self._layout.names[0]!r} or all local axes {local}, since an SPMD "
                "mesh must span all devices of a rank. Name all of them."
            )
        if wanted not in self._local:
            order = [local.index(name) for name in wanted]
            devices = self._devices.transpose(order)
            self._local[wanted] = xs.Mesh(devices.flatten(), devices.shape, wanted)
        return self._local[wanted]

    def _check_process_axis(self, what: str, mesh_dim: str | int | None) -> None:
        first = self._layout.names[0]
        if mesh_dim not in (None, 0, first):
            raise ValueError(
                f"{what}: expected the process axis {first!r}, got {mesh_dim!r}, an "
                "axis over the devices of one rank. Use it in a sharding instead."
            )


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
) -> PipelineMesh:
    """Make the mesh of the job; every rank must call it.

    Args:
        device_type: "xla".
        mesh_shape: Number of ranks, then the sizes of the local axes.
        mesh_dim_names: Name of every axis, e.g. `("pp", "data", "model")`.

    Raises:
        ValueError: The shape does not fit the number of ranks or devices, on every
            rank; or `init_process_group("xla_pp")` was not called before.
    """
    if device_type != "xla":
        raise ValueError(
            f"init_device_mesh: expected device_type 'xla', got {device_type!r}. Use "
            "torch.distributed.device_mesh for other devices."
        )
    layout = MeshLayout(shape=tuple(mesh_shape), names=tuple(mesh_dim_names or ()))
    group = of_group(None)
    device()
    counts = group.rendezvous.exchange("devices", xla_compat.num_local_devices())
    faults = layout.faults(group.size(), counts)
    if faults:
        raise ValueError(
            f"init_device_mesh: mesh {layout} does not fit the job:\n  "
            + "\n  ".join(faults)
            + f"\nChange the mesh, or launch with: {launch_hint(layout)}"
        )
    processes = _init_torch_mesh(
        "cpu", layout.shape[:1], mesh_dim_names=layout.names[:1]
    )
    return PipelineMesh(layout, processes)
