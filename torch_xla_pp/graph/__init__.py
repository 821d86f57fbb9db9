"""WHAT: the stages of a split model and the values that flow between them."""

from torch_xla_pp.graph.finish import describe, finish
from torch_xla_pp.graph.marks import pipeline_yield
from torch_xla_pp.graph.prepare import Prepared, prepare
from torch_xla_pp.graph.split import (
    check_split_spec,
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

__all__ = [
    "Prepared",
    "SharedParameter",
    "Slot",
    "Source",
    "Stage",
    "StageEdge",
    "StageGraph",
    "StageValue",
    "Template",
    "check_split_spec",
    "describe",
    "finish",
    "parameter_names",
    "pipeline_yield",
    "prepare",
    "tie_parameters",
    "untied",
]
