"""Compile stages: from a module to XLA programs that are traced once."""

from torch_xla_pp.compile.border import Border
from torch_xla_pp.compile.checkpoint_regions import marking_checkpoints
from torch_xla_pp.compile.explanation import (
    Explanation,
    ProgramCost,
    bytes_of,
    costs_of,
)
from torch_xla_pp.compile.export import export_joint
from torch_xla_pp.compile.joint_graph import JointGraph
from torch_xla_pp.compile.loss_cost import cost_of_loss, returned_by, unknown_ops
from torch_xla_pp.compile.loss_program import LossProgram, of_rows, split_loss
from torch_xla_pp.compile.lowering import LoweringRule
from torch_xla_pp.compile.model_work import work_of
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
from torch_xla_pp.compile.product_rules import Constraints, LibraryProducts
from torch_xla_pp.compile.program import Program
from torch_xla_pp.compile.program_spec import ProgramSpec
from torch_xla_pp.compile.rank_rules import is_constrained, rules_of
from torch_xla_pp.compile.sizes import device_bytes
from torch_xla_pp.compile.stage_compiler import (
    CompiledStage,
    StageCompiler,
    StageKind,
    StageSource,
    example_of,
)
from torch_xla_pp.compile.stage_loss import StageLoss
from torch_xla_pp.compile.stage_programs import Forwarded, StagePrograms, SummedGrads
from torch_xla_pp.compile.stage_specs import Borders, tangent_name

__all__ = [
    "Border",
    "Borders",
    "BucketKind",
    "CompiledStage",
    "Constraints",
    "Explanation",
    "Forwarded",
    "Function",
    "JointGraph",
    "LibraryProducts",
    "LossProgram",
    "LoweringRule",
    "MARK",
    "Program",
    "ProgramCost",
    "ProgramSpec",
    "Remat",
    "StageCompiler",
    "StageFunctions",
    "StageKind",
    "StageLoss",
    "StagePrograms",
    "StageSource",
    "SummedGrads",
    "accumulated",
    "accumulator",
    "bucket_name",
    "buffer_role",
    "bytes_of",
    "check_remat",
    "copied",
    "cost_of_loss",
    "costs_of",
    "device_bytes",
    "example_of",
    "export_joint",
    "given_grad",
    "input_grad",
    "input_role",
    "is_buffer",
    "is_constrained",
    "marking_checkpoints",
    "name_in_module",
    "nothing",
    "output_name",
    "parameter_role",
    "partition_joint",
    "returned_by",
    "route_in",
    "route_out",
    "of_rows",
    "rules_of",
    "split_loss",
    "shared_part",
    "shared_total",
    "tangent",
    "tangent_name",
    "unknown_ops",
    "work_of",
]
