"""Compile stages: from a module to XLA programs that are traced once."""

from torch_xla_pp.compile.border import ROUTE_IN, ROUTE_OUT
from torch_xla_pp.compile.export import JointGraph, export_joint, marking_checkpoints
from torch_xla_pp.compile.loss import LossProgram
from torch_xla_pp.compile.partition import (
    Function,
    Remat,
    StageFunctions,
    accumulator,
    check_remat,
    partition_joint,
)
from torch_xla_pp.compile.program import Program
from torch_xla_pp.compile.stage_programs import Borders, Forwarded, StagePrograms

__all__ = [
    "Borders",
    "Forwarded",
    "Function",
    "JointGraph",
    "LossProgram",
    "Program",
    "ROUTE_IN",
    "ROUTE_OUT",
    "Remat",
    "StageFunctions",
    "StagePrograms",
    "accumulator",
    "check_remat",
    "export_joint",
    "marking_checkpoints",
    "partition_joint",
]
