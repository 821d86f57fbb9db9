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
from torch_xla_pp.compile.lines import place_of
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
    is_tangent,
    name_in_module,
    output_name,
    parameter_role,
    route_in,
    route_out,
    shared_part,
    shared_total,
    storage_of,
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
from torch_xla_pp.compile.program import (
    AbstractValue,
    BoundValues,
    LoweredProgram,
    Program,
)
from torch_xla_pp.compile.program_spec import ProgramSpec
from torch_xla_pp.compile.rank_rules import is_constrained, library_rules, rules_of
from torch_xla_pp.compile.sizes import Size, device_bytes
from torch_xla_pp.compile.stage_compiler import (
    CompiledStage,
    StageCompiler,
    StageKind,
    StageSource,
    example_of,
)
from torch_xla_pp.compile.stage_loss import RowWeights, StageLoss
from torch_xla_pp.compile.stage_programs import (
    Forwarded,
    StagePrograms,
    SummedGrads,
    ValueSizes,
)
from torch_xla_pp.compile.stage_specs import Borders, ProgramName, tangent_name
from torch_xla_pp.compile.stage_tracer import StageTracer

__all__ = [
    "AbstractValue",
    "Border",
    "Borders",
    "BoundValues",
    "BucketKind",
    "CompiledStage",
    "Constraints",
    "Explanation",
    "Forwarded",
    "Function",
    "JointGraph",
    "LibraryProducts",
    "LossProgram",
    "LoweredProgram",
    "LoweringRule",
    "MARK",
    "Program",
    "ProgramCost",
    "ProgramName",
    "ProgramSpec",
    "Remat",
    "RowWeights",
    "StageCompiler",
    "StageFunctions",
    "StageKind",
    "StageLoss",
    "StagePrograms",
    "StageSource",
    "StageTracer",
    "Size",
    "SummedGrads",
    "ValueSizes",
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
    "is_tangent",
    "library_rules",
    "marking_checkpoints",
    "name_in_module",
    "nothing",
    "output_name",
    "parameter_role",
    "place_of",
    "partition_joint",
    "returned_by",
    "route_in",
    "route_out",
    "of_rows",
    "rules_of",
    "split_loss",
    "shared_part",
    "shared_total",
    "storage_of",
    "tangent",
    "tangent_name",
    "unknown_ops",
    "work_of",
]
