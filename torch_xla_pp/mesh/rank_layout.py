"""The partitions of a stage's values over the devices of its rank."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch_xla_pp.mesh.axis_rules import AxisRules, axis_of
from torch_xla_pp.mesh.local_mesh import (
    Axis,
    LocalMesh,
    LogicalAxes,
    Partition,
    axis_names,
)

BatchAxis = str | tuple[str, ...] | None

AUTO = "auto"
_DATA_AXIS = "data"
_BATCH = "batch"
_ON_MESH = "@"
ROWS = _ON_MESH
"""The axis that `shard` takes for a dimension that is split as the batch is."""


def on_mesh(axis: Axis) -> str:
    """Return the axis that `shard` takes for a dimension split over mesh axes."""
    return "".join(_ON_MESH + name for name in axis_names(axis))


def is_on_mesh(axes: LogicalAxes) -> bool:
    """Return whether axes of `shard` are mesh axes, which need no rules."""
    return any(name is not None and name.startswith(_ON_MESH) for name in axes)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """The mesh of one rank, and the axes that split batches and activations over it.

    Args:
        local: The rank's mesh.
        batch_axis: The axis that dimension 0 of microbatches is split over, None to
            replicate them.
        rules: The rules for logical axes, None if there are none.
    """

    local: LocalMesh
    batch_axis: BatchAxis
    rules: AxisRules | None = None

    @classmethod
    def of(
        cls, local: LocalMesh, batch_axis: BatchAxis, rules: AxisRules | None = None
    ) -> "RankLayout":
        """Return the layout for a batch axis as users name it.

        Args:
            local: The rank's mesh.
            batch_axis: As for the class, or "auto" for the axis of the logical axis
                "batch" in `rules`, or else for the axis called "data" if there is one.
            rules: As for the class.

        Raises:
            ValueError: The mesh lacks the axis.
        """
        if batch_axis == AUTO:
            batch_axis = _DATA_AXIS if _DATA_AXIS in local.names else None
            if rules is not None and _BATCH in rules.axes:
                batch_axis = rules.axes[_BATCH]
            # Unknown axes of rules are reported with all other faults of the rules.
            return cls(local=local, batch_axis=batch_axis, rules=rules)
        unknown = [name for name in axis_names(batch_axis) if name not in local.names]
        if unknown:
            raise ValueError(
                f"batch_axis: expected axes of the local mesh {local.names}, got "
                f"{unknown}. Name one of them, or pass None to replicate the batch."
            )
        return cls(local=local, batch_axis=batch_axis, rules=rules)

    @property
    def num_row_groups(self) -> int:
        """Return the number of devices over which the rows of a batch are split."""
        return self.local.axis_size(self.batch_axis)

    def check_batch(self, rows: int) -> None:
        """Refuse a microbatch that does not divide over the batch axis.

        Raises:
            ValueError: It does not; rows and axis are named.
        """
        size = self.num_row_groups
        if rows % size:
            raise ValueError(
                f"microbatch of {rows} rows does not divide over mesh axis "
                f"{self.batch_axis!r} of {size} devices: expected a multiple of "
                f"{size}. Change the batch size or the number of microbatches."
            )

    def batch_dim(self, partition: Partition) -> int | None:
        """Return the dimension of a value that is split over the batch axis."""
        axes = [axis_names(axis) for axis in partition]
        batch = axis_names(self.batch_axis)
        return axes.index(batch) if batch in axes else None

    def batch_partition(self, shape: tuple[int, ...], rows: int) -> Partition:
        """Return the partition of a value, split if its dimension 0 is the batch."""
        whole: Partition = (None,) * len(shape)
        if not shape or shape[0] != rows:
            return whole
        return (self.batch_axis, *whole[1:])

    def partition_of(
        self, axes: LogicalAxes | None, shape: tuple[int, ...], rows: int
    ) -> Partition:
        """Return the partition of a value between stages.

        Args:
            axes: Its logical axes, None if it has none.
            shape: Its shape.
            rows: Rows of a microbatch.
        """
        if axes is not None and is_on_mesh(axes):
            return self._on_mesh(axes)
        if axes is None or self.rules is None:
            return self.batch_partition(shape, rows)
        return self.rules.partition(axes, shape, self.local)[0]

    def constraint(self, axes: LogicalAxes) -> Partition | None:
        """Return the partition for axes of a call of `shard`, None if it is free."""
        if is_on_mesh(axes):
            return self._on_mesh(axes)
        if self.rules is None:
            return None
        mesh_axis = self.rules.mesh_axis
        return tuple(None if name is None else mesh_axis(name) for name in axes)

    def _on_mesh(self, axes: LogicalAxes) -> Partition:
        return tuple(map(self._named, axes))

    def _named(self, name: str | None) -> Axis:
        if name is None or name == ROWS:
            return None if name is None else self.batch_axis
        return axis_of(name.removeprefix(_ON_MESH).split(_ON_MESH))

    def constraint_faults(
        self, constraints: Iterable[tuple[LogicalAxes, tuple[int, ...]]]
    ) -> list[str]:
        """List the faults of calls of `shard`, given as axes and shapes."""
        found = {
            f"shard of a value of shape {list(shape)} as {axes}: {fault}"
            for axes, shape in constraints
            for fault in self._faults(axes, shape)
        }
        return sorted(found)

    def _faults(self, axes: LogicalAxes, shape: tuple[int, ...]) -> list[str]:
        if is_on_mesh(axes):
            return self.local.faults(shape, self._on_mesh(axes))
        return (
            []
            if self.rules is None
            else self.rules.partition(axes, shape, self.local)[1]
        )
