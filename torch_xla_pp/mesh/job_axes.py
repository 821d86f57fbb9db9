"""The axes of a whole job: some over processes, the others over local devices.

Terms: a *process axis* counts ranks of torchrun (`pp`, and e.g. `dp` for replicas of
the whole pipeline); a *local axis* counts XLA devices of one rank. The first axes of
a mesh are its process axes, all others are local.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

PIPELINE_AXIS = "pp"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshLayout:
    """The axes of a job's mesh, with their names and sizes.

    Args:
        shape: Size of every axis.
        names: Name of every axis; one of them is "pp".
        num_process_axes: How many of the first axes count ranks; None for all up to
            "pp".

    Raises:
        ValueError: An axis has no name, the name of another, or no positive size; or
            none is called "pp".
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    num_process_axes: int | None = None

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
        if PIPELINE_AXIS not in self.names:
            raise ValueError(
                f"init_device_mesh: expected an axis called {PIPELINE_AXIS!r}, the "
                f"ranks of one pipeline, got {self.names}. Rename one of the first "
                f"axes, or add one of size 1."
            )

    def __str__(self) -> str:
        return _listed(self.names, self.shape)

    def of_ranks(self, world_size: int) -> "MeshLayout":
        """Return the layout whose process axes have as many ranks as a job.

        They are the fewest that match the number of ranks and include "pp"; the axes up
        to "pp" if none match.
        """
        fitting = [n for n in self._choices if math.prod(self.shape[:n]) == world_size]
        return replace(self, num_process_axes=fitting[0] if fitting else None)

    @property
    def process_names(self) -> tuple[str, ...]:
        """Return the names of the process axes."""
        return self.names[: self._num_process_axes]

    @property
    def process_shape(self) -> tuple[int, ...]:
        """Return the sizes of the process axes."""
        return self.shape[: self._num_process_axes]

    @property
    def local_names(self) -> tuple[str, ...]:
        """Return the names of the local axes."""
        return self.names[self._num_process_axes :]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the sizes of the local axes."""
        return self.shape[self._num_process_axes :]

    @property
    def num_processes(self) -> int:
        """Return the number of ranks that the mesh needs."""
        return math.prod(self.process_shape)

    @property
    def num_local_devices(self) -> int:
        """Return the number of XLA devices that every rank needs."""
        return math.prod(self.local_shape)

    def faults(self, world_size: int, device_counts: Sequence[int]) -> list[str]:
        """List what does not fit between this mesh and a job.

        Args:
            world_size: Number of ranks of the job.
            device_counts: Number of XLA devices of each rank.
        """
        found = []
        if world_size != self.num_processes:
            choices = [
                f"{math.prod(self.shape[:n])} ({_listed(self.names[:n], self.shape)})"
                for n in self._choices
            ]
            found.append(
                f"the first axes, up to {PIPELINE_AXIS!r} or further, count processes: "
                f"expected {' or '.join(choices)} ranks, got {world_size}"
            )
        wrong = {
            rank: count
            for rank, count in enumerate(device_counts)
            if count != self.num_local_devices
        }
        if wrong:
            axes = ", ".join(self.local_names) or "none"
            counts = ", ".join(f"rank {r} has {n}" for r, n in wrong.items())
            found.append(
                f"the local axes ({axes}) count devices of one rank: expected "
                f"{self.num_local_devices} per rank, got: {counts}"
            )
        return found

    @property
    def _num_process_axes(self) -> int:
        return self.num_process_axes or self._choices[0]

    @property
    def _choices(self) -> range:
        """Return the possible numbers of process axes."""
        return range(self.names.index(PIPELINE_AXIS) + 1, len(self.names) + 1)


def launch_hint(layout: MeshLayout) -> str:
    """Return the command that launches a job with this mesh."""
    return (
        f"CPU_NUM_DEVICES={layout.num_local_devices} torchrun --nproc-per-node "
        f"{layout.num_processes} script.py"
    )


def _listed(names: Sequence[str], shape: Sequence[int]) -> str:
    return " x ".join(f"{n}={size}" for n, size in zip(names, shape, strict=False))
