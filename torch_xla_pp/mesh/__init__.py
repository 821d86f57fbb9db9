"""WHERE: a job's axes, and how values are sharded over a rank's devices. Pure."""

from torch_xla_pp.mesh import presets
from torch_xla_pp.mesh.axis_rules import AxisRules, axis_of, first_match, unmatched
from torch_xla_pp.mesh.job_axes import MeshLayout, launch_hint
from torch_xla_pp.mesh.local_mesh import (
    Axis,
    LocalMesh,
    LogicalAxes,
    Partition,
    TensorSpec,
    axis_names,
)
from torch_xla_pp.mesh.noted import note_partition, noted_partition
from torch_xla_pp.mesh.rank_hosts import host_faults
from torch_xla_pp.mesh.rank_layout import (
    AUTO,
    ROWS,
    BatchAxis,
    RankLayout,
    is_on_mesh,
    on_mesh,
)
from torch_xla_pp.mesh.reshard import Piece, Runs, reshard
from torch_xla_pp.mesh.rules import Sharding, assign_partitions, match_rules
from torch_xla_pp.mesh.strategy_names import strategy_names
from torch_xla_pp.mesh.striping import striped_positions
from torch_xla_pp.mesh.tiling import Box, Tiling

__all__ = [
    "AUTO",
    "Axis",
    "AxisRules",
    "BatchAxis",
    "Box",
    "LocalMesh",
    "LogicalAxes",
    "MeshLayout",
    "Partition",
    "Piece",
    "ROWS",
    "RankLayout",
    "Runs",
    "Sharding",
    "TensorSpec",
    "Tiling",
    "assign_partitions",
    "axis_names",
    "axis_of",
    "first_match",
    "host_faults",
    "is_on_mesh",
    "launch_hint",
    "match_rules",
    "note_partition",
    "noted_partition",
    "on_mesh",
    "presets",
    "reshard",
    "strategy_names",
    "striped_positions",
    "unmatched",
]
