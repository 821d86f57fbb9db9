"""The mesh of a whole job: process axes and the axes of each rank's devices.

Ranks come from torch.distributed. torch_xla sees every process as a world of its own,
so its rank and world size say nothing about the job.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
import torch_xla.distributed.spmd as xs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as _init_torch_mesh

from torch_xla_pp import xla_compat
from torch_xla_pp.launch.xla_device import device
from torch_xla_pp.mesh import MeshLayout, launch_hint
from torch_xla_pp.planner import PipelinePlan
from torch_xla_pp.transport import XlaPpProcessGroup, of_group


def explain_mesh() -> None:
    """Let torch_xla's mesh say what its device ids are in a job of several worlds.

    It asserts that they are those of this process, which fails in scripts that number
    the devices of a whole job.
    """
    make = xs.Mesh.__init__

    @functools.wraps(make)
    def explained(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            make(self, *args, **kwargs)
        except AssertionError as error:
            count = xla_compat.num_local_devices()
            raise ValueError(
                f"Mesh: {error}. Every rank is an SPMD world of its own: expected the "
                f"devices of this rank, 0..{count - 1}. Take a slice of what "
                f"init_device_mesh returns, or pass np.arange({count})."
            ) from error

    xs.Mesh.__init__ = explained


class PipelineMesh:
    """A mesh over ranks, combined with a mesh over each rank's devices.

    The first axes count ranks and behave as one of `torch.distributed`'s meshes:
    `get_group`, `get_local_rank`, `mesh["pp"]`. The other axes count the devices of a
    rank: slicing them gives the SPMD mesh that torch_xla's `mark_sharding` takes.

    Example:
        >>> mesh = init_device_mesh("xla", (2, 2, 2),
        ...                         mesh_dim_names=("dp", "pp", "model"))
        >>> mesh.get_group("dp").size(), mesh["model"].mesh_shape  # on four ranks
        (2, (2,))
    """

    device_type = "xla"

    def __init__(self, layout: MeshLayout, processes: DeviceMesh) -> None:
        self._layout = layout
        self._processes = processes
        self._local: dict[tuple[str, ...], Any] = {}
        devices = np.arange(layout.num_local_devices)
        self._devices = devices.reshape(layout.local_shape)

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
        """Return the process group of a process axis; None names the only one.

        Raises:
            ValueError: `mesh_dim` is a local axis, which has no process group, or there
                are several process axes and it names none.
        """
        return self._processes.get_group(self._process_axis("get_group", mesh_dim))

    def get_local_rank(self, mesh_dim: str | int | None = None) -> int:
        """Return this process's position on a process axis; None names the only one.

        Raises:
            ValueError: As for `get_group`.
        """
        axis = self._process_axis("get_local_rank", mesh_dim)
        return self._processes.get_local_rank(axis)

    def __getitem__(self, names: str | tuple[str, ...]) -> Any:
        """Return the mesh of the named axes.

        Args:
            names: Process axes, for a `DeviceMesh` over ranks; or all local axes in
                any order, for a torch_xla SPMD mesh over this rank's devices.

        Raises:
            ValueError: The names are neither.
        """
        wanted = (names,) if isinstance(names, str) else tuple(names)
        processes, local = self._layout.process_names, self._layout.local_names
        if wanted and set(wanted) <= set(processes):
            return self._processes[wanted]
        if sorted(wanted) != sorted(local):
            raise ValueError(
                f"mesh{list(wanted)}: expected process axes out of {processes}, or "
                f"all local axes {local}, since an SPMD mesh must span all devices of "
                "a rank. Name all of them."
            )
        if wanted not in self._local:
            order = [local.index(name) for name in wanted]
            devices = self._devices.transpose(order)
            self._local[wanted] = xs.Mesh(devices.flatten(), devices.shape, wanted)
        return self._local[wanted]

    def _process_axis(self, what: str, mesh_dim: str | int | None) -> str:
        """Return the name of a process axis."""
        axes = self._layout.process_names
        if mesh_dim is None and len(axes) == 1:
            return axes[0]
        if isinstance(mesh_dim, int) and 0 <= mesh_dim < len(axes):
            return axes[mesh_dim]
        if isinstance(mesh_dim, str) and mesh_dim in axes:
            return mesh_dim
        raise ValueError(
            f"{what}: expected one of the process axes {axes}, got {mesh_dim!r}. Axes "
            "over the devices of one rank belong into a sharding; an axis of size 1 "
            "counts processes if it stands before 'pp'."
        )


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...] | None = None,
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    plan: PipelinePlan | None = None,
) -> PipelineMesh:
    """Make the mesh of the job; every rank must call it.

    All ranks get equal local axes. Where they have other devices or shard values over
    other axes, each makes a torch_xla mesh of its own for its stages; or a plan says
    what each has.

    Args:
        device_type: "xla".
        mesh_shape: Size of every axis. The first ones, as many as make the number of
            ranks, count processes; the others count the devices of a rank.
        mesh_dim_names: Name of every axis, e.g. `("dp", "pp", "data", "model")`. "pp"
            must be a process axis; others hold replicas of the pipeline, see
            `replicas` of `PipelineStage`.
        plan: In place of shape and names: process axes "dp", if there are replicas, and
            "pp", and local axes as planned for the rank.

    Raises:
        ValueError: The shape or the plan does not fit the number of ranks or devices,
            or ranks have different plans, on every rank; or
            `init_process_group("xla_pp")` was not called before.
    """
    if device_type != "xla":
        raise ValueError(
            f"init_device_mesh: expected device_type 'xla', got {device_type!r}. Use "
            "torch.distributed.device_mesh for other devices."
        )
    group = of_group(None)
    if plan is not None:
        return _planned_mesh(plan, group)
    shape, names = tuple(mesh_shape or ()), tuple(mesh_dim_names or ())
    layout = MeshLayout(shape=shape, names=names)
    device()
    counts = group.rendezvous.exchange("devices", xla_compat.num_local_devices())
    layout = layout.of_ranks(group.size())
    faults = layout.faults(group.size(), counts)
    if faults:
        raise ValueError(
            f"init_device_mesh: mesh {layout} does not fit the job:\n  "
            + "\n  ".join(faults)
            + f"\nChange the mesh, or launch with: {launch_hint(layout)}"
        )
    return _mesh_of(layout)


def _planned_mesh(plan: PipelinePlan, group: XlaPpProcessGroup) -> PipelineMesh:
    """Make the mesh of a plan, or say on every rank what does not fit."""
    device()
    own = (xla_compat.num_local_devices(), plan.digest)
    found = group.rendezvous.exchange("devices of a plan", own)
    planned = plan.ranks * plan.batch.replicas
    faults = _plan_faults([rank.devices for rank in planned], found)
    if faults:
        raise ValueError(
            "init_device_mesh: the plan does not fit the job:\n  "
            + "\n  ".join(faults)
            + "\nMake another plan, or launch with: TORCH_XLA_PP_PLAN=plan.json "
            f"torchrun --nproc-per-node {len(planned)} script.py"
        )
    axes = {"dp": plan.batch.replicas} if plan.batch.replicas > 1 else {}
    axes["pp"] = len(plan.ranks)
    local = planned[group.rank()].mesh
    return _mesh_of(
        MeshLayout(
            shape=(*axes.values(), *local.values()),
            names=(*axes, *local),
            num_process_axes=len(axes),
        )
    )


def _plan_faults(devices: Sequence[int], found: Sequence[tuple[int, str]]) -> list[str]:
    """List what does not fit between a plan and the ranks of a job.

    Args:
        devices: Devices of each rank as planned.
        found: Devices of each rank as launched, and the digest of its plan.
    """
    faults = []
    if len(devices) != len(found):
        faults.append(f"expected {len(devices)} ranks, got {len(found)}")
    for rank, (wanted, (count, _)) in enumerate(zip(devices, found, strict=False)):
        if wanted != count:
            faults.append(f"rank {rank}: expected {wanted} devices, got {count}")
    digests = [digest for _, digest in found]
    if len(set(digests)) > 1:
        faults.append(f"expected the same plan on every rank, got {digests}")
    return faults


def _mesh_of(layout: MeshLayout) -> PipelineMesh:
    processes = _init_torch_mesh(
        "cpu", layout.process_shape, mesh_dim_names=layout.process_names
    )
    return PipelineMesh(layout, processes)
