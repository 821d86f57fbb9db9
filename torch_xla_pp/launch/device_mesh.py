"""The mesh of a whole job: process axes and the axes of each rank's devices.

Ranks come from torch.distributed. torch_xla sees every process as a world of its own,
so its rank and world size are not those of the job.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
import torch_xla.distributed.spmd as xs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as _init_torch_mesh

from torch_xla_pp import env, xla_compat
from torch_xla_pp.launch.rank_mesh import RankMesh, named_axes, rank_mesh
from torch_xla_pp.launch.xla_device import device
from torch_xla_pp.mesh import MeshLayout, host_faults, launch_hint
from torch_xla_pp.planner import PipelinePlan
from torch_xla_pp.transport import XlaPpProcessGroup, of_group


def explain_mesh() -> None:
    """Let errors of torch_xla's mesh explain device ids in a job of several worlds.

    The mesh asserts that ids are those of this process, which fails in scripts that
    number the devices of a whole job.
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
    rank: slicing any of them gives a `RankMesh`, which torch_xla's `mark_sharding`,
    torch's `distribute_tensor` and stages accept. A slice of both kinds is a mesh of
    this class again.

    Example:
        >>> mesh = init_device_mesh("xla", (2, 2, 2),
        ...                         mesh_dim_names=("dp", "pp", "model"))
        >>> mesh.get_group("dp").size(), mesh["model"].mesh_shape  # on four ranks
        (2, (2,))
    """

    device_type = "xla"

    def __init__(
        self,
        layout: MeshLayout,
        processes: DeviceMesh,
        named: Sequence[str] | None = None,
        whole: RankMesh | None = None,
    ) -> None:
        self._layout = layout
        self._processes = processes
        self._named = layout.names if named is None else tuple(named)
        self._whole = whole
        self._slices: dict[tuple[str, ...], RankMesh] = {}

    def __repr__(self) -> str:
        axes = zip(self._named, self.shape, strict=True)
        return f"PipelineMesh({' x '.join(f'{name}={size}' for name, size in axes)})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the size of every axis."""
        sizes = dict(zip(self._layout.names, self._layout.shape, strict=True))
        return tuple(sizes[name] for name in self._named)

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self._named)

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Return the name of every axis."""
        return self._named

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the size of one axis, or of the whole mesh."""
        return math.prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]

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
            names: Process axes, for a `DeviceMesh` over ranks; local axes, in any
                order, for a `RankMesh` over this rank's devices; or some of both.

        Raises:
            ValueError: There is no such axis, or one is named twice.
        """
        wanted = named_axes(names, self._named)
        if set(wanted) <= set(self._layout.process_names):
            return self._processes[wanted]
        if not set(wanted) <= set(self._layout.local_names):
            whole = self._rank_mesh
            return PipelineMesh(self._layout, self._processes, wanted, whole)
        if wanted not in self._slices:
            self._slices[wanted] = self._rank_mesh[wanted]
        return self._slices[wanted]

    @functools.cached_property
    def _rank_mesh(self) -> RankMesh:
        names, shape = self._layout.local_names, self._layout.local_shape
        return self._whole or rank_mesh(dict(zip(names, shape, strict=True)))

    def _process_axis(self, what: str, mesh_dim: str | int | None) -> str:
        """Return the name of a process axis."""
        axes = tuple(n for n in self._named if n in self._layout.process_names)
        if isinstance(mesh_dim, int) and 0 <= mesh_dim < self.ndim:
            mesh_dim = self._named[mesh_dim]
        if mesh_dim is None and len(axes) == 1:
            return axes[0]
        if isinstance(mesh_dim, str) and mesh_dim in axes:
            return mesh_dim
        raise ValueError(
            f"{what}: expected one of the process axes {axes}, got {mesh_dim!r}. Axes "
            "over the devices of one rank belong in a sharding; an axis of size 1 "
            "counts processes if it stands before 'pp'."
        )


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...] | None = None,
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    plan: PipelinePlan | None = None,
    shapes: Sequence[Mapping[str, int]] | None = None,
    slow: Sequence[str] | None = None,
) -> PipelineMesh:
    """Make the mesh of the job; every rank must call it.

    All ranks get equal local axes, unless `shapes` or a plan gives each its own.

    Args:
        device_type: "xla".
        mesh_shape: Size of every axis. The first ones, as many as make the number of
            ranks, count processes; the others count the devices of a rank.
        mesh_dim_names: Name of every axis, e.g. `("dp", "pp", "data", "model")`. "pp"
            must be a process axis; others hold replicas of the pipeline, see
            `replicas` of `PipelineStage`.
        plan: In place of shape and names: process axes "dp", if there are replicas, and
            "pp", and local axes as planned for the rank.
        shapes: In place of all these: the local axes of each rank of a pipeline, name →
            size. Process axes are "pp", and "dp" before it if there are ranks for
            several such pipelines.
        slow: Process axes that may connect hosts, such as replicas. If given, it is an
            error if another axis leaves a host. Ranks of one host are next to each
            other, so slow axes come first.

    Raises:
        ValueError: The shape or the plan does not fit the number of ranks or devices,
            or ranks have different plans or shapes, on every rank; or
            `init_process_group("xla_pp")` was not called before.

    Example:
        >>> mesh = init_device_mesh("xla", shapes=[{"data": 2}, {"model": 4}])
    """
    if device_type != "xla":
        raise ValueError(
            f"init_device_mesh: expected device_type 'xla', got {device_type!r}. Use "
            "torch.distributed.device_mesh for other devices."
        )
    group = of_group(None)
    if plan is not None:
        return _checked(_planned_mesh(plan, group), slow, group)
    if shapes is not None:
        found = _mesh_of_shapes([dict(axes) for axes in shapes], group)
        return _checked(found, slow, group)
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
    return _checked(_mesh_of(layout), slow, group)


def _checked(
    mesh: PipelineMesh, slow: Sequence[str] | None, group: XlaPpProcessGroup
) -> PipelineMesh:
    """Refuse a mesh whose fast axes leave a host, on every rank."""
    if slow is None:
        return mesh
    hosts = group.rendezvous.exchange("hosts", env.host_name())
    faults = host_faults(mesh._layout, slow, hosts)
    if faults:
        raise ValueError(
            f"init_device_mesh: mesh {mesh._layout} does not fit the hosts:\n  "
            + "\n  ".join(faults)
            + "\nPut slow axes first, and start as many ranks on a host as the fast "
            "axes have."
        )
    return mesh


def _planned_mesh(plan: PipelinePlan, group: XlaPpProcessGroup) -> PipelineMesh:
    """Make the mesh of a plan, or raise on every rank with all that does not fit."""
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
    return _mesh_of_rank(
        planned[group.rank()].mesh, plan.batch.replicas, len(plan.ranks)
    )


def _mesh_of_shapes(
    shapes: Sequence[dict[str, int]], group: XlaPpProcessGroup
) -> PipelineMesh:
    """Make the mesh of ranks with axes of their own."""
    device()
    replicas = max(1, group.size() // max(1, len(shapes)))
    own = (xla_compat.num_local_devices(), str(list(shapes)))
    found = group.rendezvous.exchange("devices of shapes", own)
    every = [*shapes] * replicas
    wanted = [math.prod(axes.values()) for axes in every]
    faults = _plan_faults(wanted, found, "shapes")
    if faults:
        raise ValueError(
            "init_device_mesh: shapes do not fit the job:\n  "
            + "\n  ".join(faults)
            + "\nChange them, or launch as many ranks, each with its CPU_NUM_DEVICES."
        )
    return _mesh_of_rank(every[group.rank()], replicas, len(shapes))


def _mesh_of_rank(local: Mapping[str, int], replicas: int, ranks: int) -> PipelineMesh:
    """Make the mesh of a rank that has local axes of its own."""
    axes = {"dp": replicas} if replicas > 1 else {}
    axes["pp"] = ranks
    return _mesh_of(
        MeshLayout(
            shape=(*axes.values(), *local.values()),
            names=(*axes, *local),
            num_process_axes=len(axes),
        )
    )


def _plan_faults(
    devices: Sequence[int], found: Sequence[tuple[int, str]], what: str = "plan"
) -> list[str]:
    """List what does not fit between a plan and the ranks of a job.

    Args:
        devices: Devices of each rank as planned.
        found: Devices of each rank as launched, and the digest of its plan.
        what: Where the devices are planned, for the text.
    """
    faults = []
    if len(devices) != len(found):
        faults.append(f"expected {len(devices)} ranks, got {len(found)}")
    for rank, (wanted, (count, _)) in enumerate(zip(devices, found, strict=False)):
        if wanted != count:
            faults.append(f"rank {rank}: expected {wanted} devices, got {count}")
    digests = [digest for _, digest in found]
    if len(set(digests)) > 1:
        faults.append(f"expected the same {what} on every rank, got {digests}")
    return faults


def _mesh_of(layout: MeshLayout) -> PipelineMesh:
    processes = _init_torch_mesh(
        "cpu", layout.process_shape, mesh_dim_names=layout.process_names
    )
    return PipelineMesh(layout, processes)
