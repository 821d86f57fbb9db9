"""Compile stages: from a module to XLA programs that are traced once."""

from torch_xla_pp.compile.border import Border
from torch_xla_pp.compile.export import JointGraph, export_joint, marking_checkpoints
from torch_xla_pp.compile.group_sums.group_gradients import Grouping
from torch_xla_pp.compile.group_sums.row_groups import RowGroups
from torch_xla_pp.compile.loss_program import LossProgram
from torch_xla_pp.compile.lowering import Constraints
from torch_xla_pp.compile.names import (
    MARK,
    BucketKind,
    accumulated,
    accumulator,
    bucket_name,
    buffer_role,
    copied,
    given_grad,
    input_grad,
    input_role,
    is_buffer,
    name_in_module,
    output_name,
    parameter_role,
    route_in,
    route_out,
    shared_part,
    shared_total,
    tangent,
)
from torch_xla_pp.compile.partition import (
    Function,
    Remat,
    StageFunctions,
    check_remat,
    nothing,
    partition_joint,
)
from torch_xla_pp.compile.program import Program
from torch_xla_pp.compile.program_spec import ProgramSpec
from torch_xla_pp.compile.stage_programs import Forwarded, StagePrograms, SummedGrads
from torch_xla_pp.compile.stage_specs import Borders, tangent_name

__all__ = [
    "Border",
    "BucketKind",
    "Borders",
    "Constraints",
    "Forwarded",
    "Function",
    "Grouping",
    "JointGraph",
    "LossProgram",
    "MARK",
    "Program",
    "ProgramSpec",
    "Remat",
    "RowGroups",
    "StageFunctions",
    "StagePrograms",
    "SummedGrads",
    "accumulated",
    "accumulator",
    "bucket_name",
    "buffer_role",
    "check_remat",
    "copied",
    "export_joint",
    "given_grad",
    "input_grad",
    "input_role",
    "is_buffer",
    "marking_checkpoints",
    "name_in_module",
    "nothing",
    "output_name",
    "parameter_role",
    "partition_joint",
    "route_in",
    "route_out",
    "shared_part",
    "shared_total",
    "tangent",
    "tangent_name",
]
