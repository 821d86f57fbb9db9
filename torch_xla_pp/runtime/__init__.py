"""RUN: stages that torch's own schedule classes drive."""

from torch_xla_pp.runtime.manual_stage import PipelineStage
from torch_xla_pp.runtime.stage import XlaPipelineStage
from torch_xla_pp.runtime.torch_compat import (
    SPLIT_MARK,
    Pipe,
    move_factories_to,
    trace_and_split,
)

__all__ = [
    "SPLIT_MARK",
    "Pipe",
    "PipelineStage",
    "XlaPipelineStage",
    "move_factories_to",
    "trace_and_split",
]
