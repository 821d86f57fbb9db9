"""WHERE: the axes of a job, and how values lie on one rank's devices. Pure values."""

from torch_xla_pp.mesh.hlo_sharding import (
    REPLICATED,
    OpShardingArgs,
    parse_sharding,
)
from torch_xla_pp.mesh.layout import MeshLayout, launch_hint
from torch_xla_pp.mesh.local_mesh import LocalMesh, Partition, TensorSpec
from torch_xla_pp.mesh.rules import match_rules

__all__ = [
    "LocalMesh",
    "MeshLayout",
    "OpShardingArgs",
    "Partition",
    "REPLICATED",
    "TensorSpec",
    "launch_hint",
    "match_rules",
    "parse_sharding",
]
