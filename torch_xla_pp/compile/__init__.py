"""Compile stages: from a module to XLA programs that are traced once."""

from torch_xla_pp.compile.border import route_in, route_out
from torch_xla_pp.compile.explanation import (
    Explanation,
    ProgramCost,
    bytes_of,
    costs_of,
)
from torch_xla_pp.compile.export import JointGraph, export_joint, marking_checkpoints
from torch_xla_pp.compile.loss_program import LossProgram
from torch_xla_pp.compile.lowering import Constraints
from torch_xla_pp.compile.partition import (
    Function,
    Remat,
    StageFunctions,
    accumulator,
    check_remat,
    partition_joint,
)
from torch_xla_pp.compile.program import MARK, Program
from torch_xla_pp.compile.replicas import ReplicaMeans
from torch_xla_pp.compile.shared import SharedSums
from torch_xla_pp.compile.sizes import Sizes, device_bytes
from torch_xla_pp.compile.stage_compiler import (
    CompiledStage,
    StageCompiler,
    StageKind,
    StageSource,
    example_of,
)
from torch_xla_pp.compile.stage_programs import (
    Borders,
    Forwarded,
    StagePrograms,
    tangent,
)
from torch_xla_pp.compile.sums import copied, copies

__all__ = [
    "Borders",
    "CompiledStage",
    "Constraints",
    "Explanation",
    "Forwarded",
    "Function",
    "JointGraph",
    "LossProgram",
    "MARK",
    "Program",
    "ProgramCost",
    "Remat",
    "ReplicaMeans",
    "SharedSums",
    "Sizes",
    "StageCompiler",
    "StageFunctions",
    "StageKind",
    "StagePrograms",
    "StageSource",
    "accumulator",
    "bytes_of",
    "check_remat",
    "copied",
    "copies",
    "costs_of",
    "device_bytes",
    "example_of",
    "export_joint",
    "marking_checkpoints",
    "partition_joint",
    "route_in",
    "route_out",
    "tangent",
]
