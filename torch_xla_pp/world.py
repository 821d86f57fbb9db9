"""The devices of one rank: a world of its own, over which XLA partitions programs."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch_xla.distributed.spmd as xs
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.hlo import REPLICATED, OpShardingArgs, stacked
from torch_xla_pp.mesh import (
    AxisRules,
    BatchAxis,
    LocalMesh,
    LogicalAxes,
    Partition,
    RankLayout,
    TensorSpec,
    axis_of,
)
from torch_xla_pp.transport import ShardLayout


class World:
    """One rank's devices, and the values on them.

    Args:
        mesh: The SPMD mesh of this rank; None for one unnamed axis over all devices.
        batch_axis: The axis that dimension 0 of microbatches is split over, see
            `RankLayout.of`.
        rules: The rules for logical axes, None if there are none.

    Raises:
        ValueError: The mesh does not span all local devices, or lacks the axis.

    Attributes:
        layout: Partitions of values over the devices.
    """

    def __init__(
        self, mesh: Any | None, batch_axis: BatchAxis, rules: AxisRules | None = None
    ) -> None:
        count = xla_compat.num_local_devices()
        if mesh is None:
            mesh = xs.Mesh(np.arange(count), (count,), ("devices",))
        # A slice of a rank's mesh also spans all devices.
        mesh = getattr(mesh, "whole", mesh)
        names = tuple(mesh.axis_names or ())
        if math.prod(mesh.mesh_shape) != count:
            raise ValueError(
                f"mesh: expected a mesh over all {count} local devices, got shape "
                f"{tuple(mesh.mesh_shape)}. Slice it out of init_device_mesh's result."
            )
        local = LocalMesh(names=names, shape=tuple(mesh.mesh_shape))
        self.layout = RankLayout.of(local, batch_axis, rules)
        self._mesh = mesh
        self._shard_layouts: dict[TensorSpec, ShardLayout] = {}
        self._zeros: dict[TensorSpec, Tensor] = {}
        self._partitions: dict[int, dict[str, Partition]] = {}

    @property
    def local(self) -> LocalMesh:
        """Return the rank's mesh."""
        return self.layout.local

    @property
    def rules(self) -> AxisRules | None:
        """Return the rules for logical axes, None if there are none."""
        return self.layout.rules

    def rows_sharding(self, num_dims: int, dim: int | None) -> xla_compat.OpSharding:
        """Return the sharding of a value with rows in `dim`, None for no rows."""
        axes = [self.layout.batch_axis if i == dim else None for i in range(num_dims)]
        return self.sharding(tuple(axes))

    def stacked(
        self, layout: OpShardingArgs, num_dims: int
    ) -> xla_compat.OpSharding | None:
        """Return the sharding of values, one per group of rows, in a new dimension 0.

        Args:
            layout: The sharding of each of them.
            num_dims: Its dimensions.

        Returns:
            None if they are split over the batch axis themselves.
        """
        first = self.sharding_args((self.layout.batch_axis,))
        found = stacked(first, layout, num_dims, self.local.num_devices)
        return None if found is None else xla_compat.sharding_from_args(*found)

    def sharding_args(self, partition: Partition) -> OpShardingArgs:
        """Return the arguments of torch_xla's sharding for a partition."""
        if not self.local.is_split(partition):
            return REPLICATED
        return OpShardingArgs(*xla_compat.mesh_sharding_args(self._mesh, partition))

    def constraint(self, axes: LogicalAxes) -> xla_compat.OpSharding | None:
        """Return torch_xla's sharding for axes of `shard`, None if it is free."""
        partition = self.layout.constraint(axes)
        return None if partition is None else self.sharding(partition)

    def sharding(self, partition: Partition) -> xla_compat.OpSharding:
        """Return torch_xla's sharding for a partition."""
        if not self.local.is_split(partition):
            return xla_compat.replicated_sharding()
        return self._mesh.get_op_sharding(tuple(partition))

    def partitions_of(self, values: Sequence[Tensor]) -> list[Partition | None]:
        """Return how values on the devices are sharded, None where it is not known."""
        are_pending = xla_compat.are_pending(values)
        texts = xla_compat.sharding_texts(values)
        found: list[Partition | None] = []
        for value, is_pending, text in zip(values, are_pending, texts, strict=True):
            if not text and not is_pending:
                found.append((None,) * value.dim())
                continue
            found.append(self._partitions_of_dims(value.dim()).get(text))
        return found

    def partition_of(
        self, sharding: xla_compat.OpSharding, num_dims: int
    ) -> Partition | None:
        """Return the partition that a sharding is of, None if it is of none."""
        text = xla_compat.sharding_text(sharding, num_dims)
        return self._partitions_of_dims(num_dims).get(text)

    def _partitions_of_dims(self, count: int) -> dict[str, Partition]:
        """Return the partitions of values of so many dimensions by their HLO texts."""
        if count not in self._partitions:
            names = [n for n in self.local.names if self.local.axis_size(n) > 1]
            table: dict[str, Partition] = {}
            for dims in itertools.product(range(-1, count), repeat=len(names)):
                chosen = [
                    tuple(n for n, d in zip(names, dims, strict=True) if d == dim)
                    for dim in range(count)
                ]
                partition = tuple(axis_of(axes) for axes in chosen)
                text = xla_compat.sharding_text(self.sharding(partition), count)
                table.setdefault(text, partition)
            self._partitions[count] = table
        return self._partitions[count]

    def shard_layout(self, spec: TensorSpec) -> ShardLayout:
        """Return the layout in which a boundary value is sent."""
        if spec not in self._shard_layouts:
            args = self.sharding_args(spec.partition)
            layout = ShardLayout.of_sharding(spec.shape, spec.dtype, args)
            self._shard_layouts[spec] = layout
        return self._shard_layouts[spec]

    def pin(self, tensor: Tensor, partition: Partition) -> Tensor:
        """Return `tensor` on the device, pending or not, sharded as `partition`.

        Values on the host are uploaded shard by shard.
        """
        is_new = tensor.device.type != "xla"
        is_split = self.local.is_split(partition)
        value = tensor.detach() if tensor.requires_grad else tensor
        if is_new and not is_split:
            return xla_compat.replicate(value)
        if is_new:
            value = value.to(xla_compat.device())
        else:
            if is_split and xla_compat.is_of_whole_values(value):
                # Cut before sharding: XLA would cut parts, and exchange rows.
                value = xla_compat.constrain(value, xla_compat.replicated_sharding())
            value = value.clone()
        xla_compat.annotate(value, self.sharding(partition))
        return value

    def place(self, tensor: Tensor, partition: Partition) -> Tensor:
        """Return `tensor` as device data, sharded as `partition`."""
        value = self.pin(tensor, partition)
        if any(xla_compat.are_pending([value])):
            xla_compat.materialize([value])
        return value

    def upload(self, value: Tensor, partition: Partition) -> Tensor:
        """Return a host value as device data; the host keeps no copy.

        `place` makes more copies, but also splits values that do not divide.
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
        """Return zeros on the device, sharded by `spec`; made once."""
        if spec not in self._zeros:
            value = torch.zeros(spec.shape, dtype=spec.dtype)
            self._zeros[spec] = self.place(value, spec.partition)
        return self._zeros[spec]
