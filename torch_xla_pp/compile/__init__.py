"""Compile stages: from a module to XLA programs that are traced once."""

from torch_xla_pp.compile.checkpoint_regions import marking_checkpoints
from torch_xla_pp.compile.export import export_joint
from torch_xla_pp.compile.group_sums.group_gradients import Grouping
from torch_xla_pp.compile.group_sums.row_groups import RowGroups
from torch_xla_pp.compile.joint_graph import JointGraph
from torch_xla_pp.compile.loss_program import LossProgram
from torch_xla_pp.compile.lowering import Rule
from torch_xla_pp.compile.names import (
    MARK,
    accumulator,
    buffer_role,
    copied,
    input_role,
    is_buffer,
    name_in_module,
    output_name,
    parameter_role,
    route_in,
    route_out,
    tangent,
)
from torch_xla_pp.compile.partition import (
    Function,
    Remat,
    StageFunctions,
    check_remat,
    partition_joint,
)
from torch_xla_pp.compile.product_rules import Constraints, LibraryProducts
from torch_xla_pp.compile.program import Program
from torch_xla_pp.compile.program_spec import ProgramSpec
from torch_xla_pp.compile.replicas import ReplicaMeans
from torch_xla_pp.compile.shared import SharedSums
from torch_xla_pp.compile.stage_programs import Forwarded, StagePrograms
from torch_xla_pp.compile.stage_specs import Borders
from torch_xla_pp.compile.sums import copies

__all__ = [
    "Borders",
    "Constraints",
    "Forwarded",
    "Function",
    "Grouping",
    "JointGraph",
    "LibraryProducts",
    "LossProgram",
    "MARK",
    "Program",
    "ProgramSpec",
    "Remat",
    "ReplicaMeans",
    "RowGroups",
    "Rule",
    "SharedSums",
    "StageFunctions",
    "StagePrograms",
    "accumulator",
    "buffer_role",
    "check_remat",
    "copied",
    "copies",
    "export_joint",
    "input_role",
    "is_buffer",
    "marking_checkpoints",
    "name_in_module",
    "output_name",
    "parameter_role",
    "partition_joint",
    "route_in",
    "route_out",
    "tangent",
]
