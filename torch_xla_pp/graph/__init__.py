"""WHAT: the stages of a split model and the values that flow between them."""

from torch_xla_pp.graph.assign import GivenStages
from torch_xla_pp.graph.atoms import Atom, atoms_of
from torch_xla_pp.graph.attention import (
    ATTENTION,
    ATTENTION_BACKWARD,
    attention,
    attention_axes,
    masked_attention,
    plain_attention,
    plain_attention_backward,
)
from torch_xla_pp.graph.autograd_functions import keeping_autograd_functions
from torch_xla_pp.graph.baked import Baked, BakedModel
from torch_xla_pp.graph.built_in_device import move_devices
from torch_xla_pp.graph.call_spec import CallSpec, call_as
from torch_xla_pp.graph.captured import Captured
from torch_xla_pp.graph.finish_split import describe_stages, finish_split
from torch_xla_pp.graph.flops import flops_by_op
from torch_xla_pp.graph.host_randomness import noting_host_randomness
from torch_xla_pp.graph.marks import pipeline_yield
from torch_xla_pp.graph.modes import (
    OtherMode,
    add_mode,
    begin_modes,
    follow_mode,
    for_each_mode,
    has_mixed_mode,
    in_mode,
    is_set,
    item_of,
    reads_training,
    refuse_modes,
)
from torch_xla_pp.graph.op_digests import digest_ops
from torch_xla_pp.graph.other_shapes import (
    add_shapes,
    has_shapes,
    in_shapes,
    inputs_in_shapes,
    mode_to_trace,
)
from torch_xla_pp.graph.patches import replaced
from torch_xla_pp.graph.prepare import Prepared, erase_marks, normalize, prepare
from torch_xla_pp.graph.score_marks import SCORES_OF
from torch_xla_pp.graph.shard import (
    SHARD,
    axes_of,
    mapped_as,
    pinned_axes,
    shard,
    shard_in_graph,
    sharding_outputs,
)
from torch_xla_pp.graph.source import Source
from torch_xla_pp.graph.stage_graph import (
    SharedParameter,
    Stage,
    StageEdge,
    StageGraph,
    StageValue,
)
from torch_xla_pp.graph.template import Slot, Template
from torch_xla_pp.graph.ties import (
    check_split_spec,
    keep_parameters,
    keep_persistence,
    original_name,
    tie_parameters,
    untied,
)
from torch_xla_pp.graph.vmaps import indexing_by_tensors

__all__ = [
    "ATTENTION",
    "ATTENTION_BACKWARD",
    "attention",
    "attention_axes",
    "masked_attention",
    "plain_attention",
    "plain_attention_backward",
    "Atom",
    "Baked",
    "BakedModel",
    "CallSpec",
    "Captured",
    "GivenStages",
    "OtherMode",
    "Prepared",
    "SCORES_OF",
    "SHARD",
    "SharedParameter",
    "Slot",
    "Source",
    "Stage",
    "StageEdge",
    "StageGraph",
    "StageValue",
    "Template",
    "add_mode",
    "add_shapes",
    "axes_of",
    "atoms_of",
    "erase_marks",
    "flops_by_op",
    "normalize",
    "noting_host_randomness",
    "begin_modes",
    "call_as",
    "check_split_spec",
    "describe_stages",
    "digest_ops",
    "finish_split",
    "follow_mode",
    "for_each_mode",
    "has_mixed_mode",
    "has_shapes",
    "in_mode",
    "in_shapes",
    "indexing_by_tensors",
    "inputs_in_shapes",
    "is_set",
    "item_of",
    "keep_parameters",
    "mode_to_trace",
    "keeping_autograd_functions",
    "mapped_as",
    "move_devices",
    "keep_persistence",
    "original_name",
    "pinned_axes",
    "pipeline_yield",
    "prepare",
    "reads_training",
    "refuse_modes",
    "replaced",
    "shard",
    "shard_in_graph",
    "sharding_outputs",
    "tie_parameters",
    "untied",
]
