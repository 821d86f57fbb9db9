"""LAUNCH: the device and the mesh of a job started by torchrun."""

from torch_xla_pp.launch.device_mesh import (
    PipelineMesh,
    explain_mesh,
    init_device_mesh,
)
from torch_xla_pp.launch.placements import annotate_for_placements
from torch_xla_pp.launch.rank_mesh import RankMesh
from torch_xla_pp.launch.xla_device import device

__all__ = ["PipelineMesh", "RankMesh", "device", "init_device_mesh"]

explain_mesh()
annotate_for_placements()
