"""WHAT: the stages of a split model and the values that flow between them."""

from torch_xla_pp.graph.split import (
    check_split_spec,
    parameter_names,
    shared_parameters,
    tie_parameters,
)
from torch_xla_pp.graph.stage_graph import StageEdge, StageGraph
from torch_xla_pp.graph.template import Slot, Template

__all__ = [
    "Slot",
    "StageEdge",
    "StageGraph",
    "Template",
    "check_split_spec",
    "parameter_names",
    "shared_parameters",
    "tie_parameters",
]
