"""The axes of a whole job: which go over processes and which over local devices.

Terms: a *process axis* counts ranks of torchrun (`pp`); a *local axis* counts XLA
devices of one rank. The first axis of a mesh is its process axis, all others are
local.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshLayout:
    """Name and size the axes of a job's mesh.

    Args:
        shape: Size of every axis; the first counts ranks, the others local devices.
        names: Name of every axis.

    Raises:
        ValueError: An axis has no name, a name twice, or no positive size.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.shape or len(self.shape) != len(self.names):
            raise ValueError(
                f"init_device_mesh: expected one name for each of the "
                f"{len(self.shape)} axes of mesh_shape {self.shape}, got "
                f"mesh_dim_names {self.names}. Pass e.g. "
                f"init_device_mesh('xla', (2, 4), mesh_dim_names=('pp', 'data'))."
            )
        if len(set(self.names)) != len(self.names):
            raise ValueError(
                f"init_device_mesh: expected distinct axis names, got {self.names}. "
                f"Rename the axes."
            )
        if any(size < 1 for size in self.shape):
            raise ValueError(
                f"init_device_mesh: expected positive axis sizes, got {self.shape}. "
                f"Give every axis at least one rank or device."
            )

    def __str__(self) -> str:
        axes = zip(self.names, self.shape, strict=True)
        return " x ".join(f"{name}={size}" for name, size in axes)

    @property
    def num_processes(self) -> int:
        """Return the number of ranks that the mesh needs."""
        return self.shape[0]

    @property
    def num_local_devices(self) -> int:
        """Return the number of XLA devices that every rank needs."""
        return math.prod(self.shape[1:])

    def faults(self, world_size: int, device_counts: Sequence[int]) -> list[str]:
        """List what does not fit between this mesh and a job.

        Args:
            world_size: Number of ranks of the job.
            device_counts: Number of XLA devices of each rank.
        """
        found = []
        if world_size != self.num_processes:
            found.append(
                f"axis {self.names[0]!r} counts processes: expected "
                f"{self.num_processes} ranks, got {world_size}"
            )
        wrong = {
            rank: count
            for rank, count in enumerate(device_counts)
            if count != self.num_local_devices
        }
        if wrong:
            axes = ", ".join(self.names[1:]) or "none"
            counts = ", ".join(f"rank {r} has {n}" for r, n in wrong.items())
            found.append(
                f"the local axes ({axes}) count devices of one rank: expected "
                f"{self.num_local_devices} per rank, got: {counts}"
            )
        return found


def launch_hint(layout: MeshLayout) -> str:
    """Say how to launch a job that has this mesh."""
    return (
        f"CPU_NUM_DEVICES={layout.num_local_devices} torchrun --nproc-per-node "
        f"{layout.num_processes} script.py"
    )
