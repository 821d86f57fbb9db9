"""LAUNCH: the device and the mesh of a job started by torchrun."""

from torch_xla_pp.launch.device_mesh import (
    PipelineMesh,
    explain_mesh,
    init_device_mesh,
)
from torch_xla_pp.launch.xla_device import device

__all__ = ["PipelineMesh", "device", "init_device_mesh"]

explain_mesh()
