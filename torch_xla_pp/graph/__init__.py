"""WHAT: the stages of a split model and the values that flow between them."""

from torch_xla_pp.graph.split import (
    check_split_spec,
    parameter_names,
    shared_parameters,
    tie_parameters,
)
from torch_xla_pp.graph.stage_graph import StageEdge, StageGraph

__all__ = [
    "StageEdge",
    "StageGraph",
    "check_split_spec",
    "parameter_names",
    "shared_parameters",
    "tie_parameters",
]
