"""What a model costs, part by part; reading it needs no torch."""

from torch_xla_pp.work.amount import Amount, Cost
from torch_xla_pp.work.work_graph import WorkGraph
from torch_xla_pp.work.works import (
    ParameterDim,
    Work,
    WorkParameter,
    WorkPart,
    WorkSum,
    WorkValue,
    added_parts,
)

__all__ = [
    "Amount",
    "Cost",
    "ParameterDim",
    "Work",
    "WorkGraph",
    "WorkParameter",
    "WorkPart",
    "WorkSum",
    "WorkValue",
    "added_parts",
]
