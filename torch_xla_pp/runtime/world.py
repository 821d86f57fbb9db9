"""Lay values out over the devices of one rank."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch_xla.distributed.spmd as xs
from torch import Tensor

from torch_xla_pp import cpu, xla_compat
from torch_xla_pp.compile import Constraints, LibraryProducts, Rule
from torch_xla_pp.hlo import REPLICATED, OpShardingArgs, stacked
from torch_xla_pp.mesh import (
    AxisRules,
    LocalMesh,
    LogicalAxes,
    Partition,
    TensorSpec,
    axis_names,
)
from torch_xla_pp.transport import ShardLayout

BatchAxis = str | tuple[str, ...] | None

AUTO = "auto"
_DATA_AXIS = "data"
_BATCH = "batch"


class World:
    """Know the devices of this rank and which mesh axis splits a batch.

    Args:
        mesh: The SPMD mesh of this rank; None for one unnamed axis over all devices.
        batch_axis: The axis that dimension 0 of microbatches is split over, None to
            replicate them, "auto" for what `rules` say of the logical axis "batch",
            or else for the axis called "data" if there is one.
        rules: What logical axes mean, None if nothing is said of them.

    Raises:
        ValueError: The mesh does not span all local devices, or lacks the axis.
    """

    def __init__(
        self, mesh: Any | None, batch_axis: BatchAxis, rules: AxisRules | None = None
    ) -> None:
        count = xla_compat.num_local_devices()
        if mesh is None:
            mesh = xs.Mesh(np.arange(count), (count,), ("devices",))
        names = tuple(mesh.axis_names or ())
        if math.prod(mesh.mesh_shape) != count:
            raise ValueError(
                f"mesh: expected a mesh over all {count} local devices, got shape "
                f"{tuple(mesh.mesh_shape)}. Slice it out of init_device_mesh's result."
            )
        is_auto = batch_axis == AUTO
        if is_auto:
            batch_axis = _DATA_AXIS if _DATA_AXIS in names else None
            if rules is not None and _BATCH in rules.axes:
                batch_axis = rules.axes[_BATCH]
        self.rules = rules
        self.local = LocalMesh(names=names, shape=tuple(mesh.mesh_shape))
        self._mesh = mesh
        self._layouts: dict[TensorSpec, ShardLayout] = {}
        self._zeros: dict[TensorSpec, Tensor] = {}
        self._batch_axis = batch_axis
        wanted = (batch_axis,) if isinstance(batch_axis, str) else batch_axis or ()
        # Unknown axes of rules are told with all else that is wrong with these.
        unknown = [name for name in wanted if name not in names and not is_auto]
        if unknown:
            raise ValueError(
                f"batch_axis: expected axes of the local mesh {names}, got {unknown}. "
                "Name one of them, or pass None to replicate the batch."
            )

    def check_batch(self, rows: int) -> None:
        """Refuse a microbatch that does not divide over the batch axis.

        Raises:
            ValueError: Names the number of rows and the axis.
        """
        size = self.local.axis_size(self._batch_axis)
        if rows % size:
            raise ValueError(
                f"microbatch of {rows} rows does not divide over mesh axis "
                f"{self._batch_axis!r} of {size} devices: expected a multiple of "
                f"{size}. Change the batch size or the number of microbatches."
            )

    @property
    def num_groups(self) -> int:
        """Return over how many devices the rows of a batch are split."""
        return self.local.axis_size(self._batch_axis)

    def batch_dim(self, partition: Partition) -> int | None:
        """Return which dimension of a value is split over the batch axis."""
        axes = [axis_names(axis) for axis in partition]
        batch = axis_names(self._batch_axis)
        return axes.index(batch) if batch in axes else None

    def rows_layout(self, num_dims: int, dim: int | None) -> xla_compat.OpSharding:
        """Return the sharding of a value that has the rows in `dim`, or has none."""
        axes = [self._batch_axis if i == dim else None for i in range(num_dims)]
        return self.sharding(tuple(axes))

    def stacked(
        self, layout: OpShardingArgs, num_dims: int
    ) -> xla_compat.OpSharding | None:
        """Return how values lie, one for each group of rows, in a new dimension 0.

        Args:
            layout: How each of them lies.
            num_dims: Its dimensions.

        Returns:
            None if they are split over the batch axis themselves.
        """
        first = self.sharding_args((self._batch_axis,))
        found = stacked(first, layout, num_dims, self.local.num_devices)
        return None if found is None else xla_compat.sharding_from_args(*found)

    def sharding_args(self, partition: Partition) -> OpShardingArgs:
        """Return what torch_xla makes the sharding for a partition of."""
        if not self.local.is_split(partition):
            return REPLICATED
        return OpShardingArgs(*xla_compat.mesh_sharding_args(self._mesh, partition))

    def layout_of(
        self, axes: LogicalAxes | None, shape: tuple[int, ...], rows: int
    ) -> Partition:
        """Return how a value lies that is between stages.

        Args:
            axes: The logical axes that it was given, None if none were.
            shape: Its shape.
            rows: Rows of a microbatch.
        """
        if axes is None or self.rules is None:
            return self.batch_partition(shape, rows)
        return self.rules.partition(axes, shape, self.local)[0]

    def constraint(self, axes: LogicalAxes) -> xla_compat.OpSharding:
        """Return torch_xla's sharding for logical axes that `rules` know."""
        rules = self.rules or AxisRules()
        return self.sharding(
            tuple(None if name is None else rules.mesh_axis(name) for name in axes)
        )

    @property
    def is_constrained(self) -> bool:
        """Return whether axis rules have a say while programs run.

        They have none on one device that multiplies with PyTorch's library: it has all
        of every value.
        """
        return self.rules is not None and cpu.library_product() is None

    def lowering_rules(self) -> tuple[Rule, ...]:
        """Return what operations of this rank's programs are run by."""
        multiply = cpu.library_product()
        if multiply is not None:
            return (LibraryProducts(multiply=multiply),)
        return (Constraints(layout=self.constraint),) if self.is_constrained else ()

    def constraint_faults(
        self, constraints: Iterable[tuple[LogicalAxes, tuple[int, ...]]]
    ) -> list[str]:
        """List what is wrong with calls of `shard`, given as axes and shapes."""
        if self.rules is None:
            return []
        found = {
            f"shard of a value of shape {list(shape)} as {axes}: {fault}"
            for axes, shape in constraints
            for fault in self.rules.partition(axes, shape, self.local)[1]
        }
        return sorted(found)

    def batch_partition(self, shape: tuple[int, ...], rows: int) -> Partition:
        """Return the partition of a value, split if its dimension 0 is the batch."""
        whole: Partition = (None,) * len(shape)
        if not shape or shape[0] != rows:
            return whole
        return (self._batch_axis, *whole[1:])

    def sharding(self, partition: Partition) -> xla_compat.OpSharding:
        """Return torch_xla's sharding for a partition."""
        if not self.local.is_split(partition):
            return xla_compat.replicated_sharding()
        return self._mesh.get_op_sharding(tuple(partition))

    def layout(self, spec: TensorSpec) -> ShardLayout:
        """Return how a boundary value travels."""
        if spec not in self._layouts:
            args = self.sharding_args(spec.partition)
            layout = ShardLayout.of_sharding(spec.shape, spec.dtype, args)
            self._layouts[spec] = layout
        return self._layouts[spec]

    def pin(self, tensor: Tensor, partition: Partition) -> Tensor:
        """Return `tensor` on the device, pending or not, laid out as `partition`.

        Values on the host are uploaded shard by shard.
        """
        sharding = self.sharding(partition)
        is_new = tensor.device.type != "xla"
        value = tensor.detach()
        if is_new and not self.local.is_split(partition):
            return xla_compat.replicate(value)
        if is_new:
            value = value.to(xla_compat.device())
        else:
            if xla_compat.is_of_whole_values(value):
                # Cut while whole: XLA would cut each device's part, and exchange rows.
                value = xla_compat.constrain(value, xla_compat.replicated_sharding())
            value = value.clone()
        xla_compat.annotate(value, sharding)
        return value

    def place(self, tensor: Tensor, partition: Partition) -> Tensor:
        """Return `tensor` as device data, laid out as `partition`."""
        value = self.pin(tensor, partition)
        xla_compat.materialize([value])
        return value

    def upload(self, value: Tensor, partition: Partition) -> Tensor:
        """Return a host value as device data; the host keeps nothing of it.

        `place` makes more copies on the way, but cuts what does not divide, too.
        """
        sharding = self.sharding(partition)
        value = value.detach()
        if not self.local.is_split(partition):
            return xla_compat.replicate(value)
        ids = self._mesh.get_logical_mesh()
        shards = []
        for device in range(ids.size):
            index = (int(i) for (i,) in np.nonzero(ids == device))
            place = dict(zip(self.local.names, index, strict=True))
            shards.append(self.local.part(value, partition, place).contiguous())
        return xla_compat.from_local_shards(shards, sharding, value.shape)

    def zeros(self, spec: TensorSpec) -> Tensor:
        """Return zeros on the device, laid out as `spec` says; made once."""
        if spec not in self._zeros:
            value = torch.zeros(spec.shape, dtype=spec.dtype)
            self._zeros[spec] = self.place(value, spec.partition)
        return self._zeros[spec]
