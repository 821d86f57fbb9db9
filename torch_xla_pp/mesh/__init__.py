"""WHERE: the axes of a job, and how values lie on one rank's devices. Pure values."""

from torch_xla_pp.mesh import presets
from torch_xla_pp.mesh.axis_rules import AxisRules, first_match, unmatched
from torch_xla_pp.mesh.hlo_collectives import Collective, collectives_of
from torch_xla_pp.mesh.hlo_flops import OWN_PRODUCT, product_flops
from torch_xla_pp.mesh.hlo_sharding import (
    REPLICATED,
    OpShardingArgs,
    parse_sharding,
    stacked,
)
from torch_xla_pp.mesh.layout import MeshLayout, launch_hint
from torch_xla_pp.mesh.local_mesh import (
    Axis,
    LocalMesh,
    LogicalAxes,
    Partition,
    TensorSpec,
    axis_names,
)
from torch_xla_pp.mesh.reshard import Piece, Runs, reshard
from torch_xla_pp.mesh.rules import Sharding, assign_partitions, match_rules
from torch_xla_pp.mesh.striping import striped_positions
from torch_xla_pp.mesh.tiling import Box, Tiling

__all__ = [
    "OWN_PRODUCT",
    "Axis",
    "AxisRules",
    "Box",
    "Collective",
    "LocalMesh",
    "LogicalAxes",
    "MeshLayout",
    "OpShardingArgs",
    "Partition",
    "Piece",
    "REPLICATED",
    "Runs",
    "Sharding",
    "TensorSpec",
    "Tiling",
    "assign_partitions",
    "axis_names",
    "collectives_of",
    "first_match",
    "launch_hint",
    "match_rules",
    "parse_sharding",
    "presets",
    "product_flops",
    "reshard",
    "stacked",
    "striped_positions",
    "unmatched",
]
