"""WHAT: the stages of a split model and the values that flow between them."""

from torch_xla_pp.graph.constraints import (
    SHARD,
    axes_of,
    mapped_as,
    shard,
    shard_in_graph,
    sharding_outputs,
)
from torch_xla_pp.graph.deferred import deferred_init
from torch_xla_pp.graph.fake import as_on_host, back_to_meta
from torch_xla_pp.graph.finish import describe, finish
from torch_xla_pp.graph.marks import pipeline_yield
from torch_xla_pp.graph.materialize import (
    lacking,
    materialize,
    record_resets,
    unwritten,
)
from torch_xla_pp.graph.modes import (
    OtherMode,
    add_mode,
    begin_modes,
    follow_mode,
    for_each_mode,
    has_mixed_mode,
    in_mode,
    is_set,
    reads_training,
    refuse_modes,
)
from torch_xla_pp.graph.prepare import Prepared, prepare
from torch_xla_pp.graph.record import value_of
from torch_xla_pp.graph.split import (
    check_split_spec,
    keep_parameters,
    keep_persistence,
    original_name,
    parameter_names,
    tie_parameters,
    untied,
)
from torch_xla_pp.graph.stage_graph import (
    SharedParameter,
    Source,
    Stage,
    StageEdge,
    StageGraph,
    StageValue,
)
from torch_xla_pp.graph.template import Slot, Template
from torch_xla_pp.graph.vmaps import indexing_by_tensors

__all__ = [
    "SHARD",
    "OtherMode",
    "Prepared",
    "SharedParameter",
    "Slot",
    "Source",
    "Stage",
    "StageEdge",
    "StageGraph",
    "StageValue",
    "Template",
    "add_mode",
    "as_on_host",
    "axes_of",
    "back_to_meta",
    "begin_modes",
    "check_split_spec",
    "deferred_init",
    "describe",
    "finish",
    "follow_mode",
    "for_each_mode",
    "has_mixed_mode",
    "in_mode",
    "is_set",
    "lacking",
    "materialize",
    "indexing_by_tensors",
    "keep_parameters",
    "keep_persistence",
    "original_name",
    "parameter_names",
    "pipeline_yield",
    "prepare",
    "mapped_as",
    "reads_training",
    "record_resets",
    "refuse_modes",
    "shard",
    "shard_in_graph",
    "sharding_outputs",
    "tie_parameters",
    "untied",
    "unwritten",
    "value_of",
]
