"""RUN: stages that torch's own schedule classes drive."""

from torch_xla_pp.runtime.grad_norm import clip_grad_norm_
from torch_xla_pp.runtime.manual_stage import PipelineStage
from torch_xla_pp.runtime.stage import XlaPipelineStage
from torch_xla_pp.runtime.torch_compat import Pipe, move_factories_to, trace_and_split

__all__ = [
    "Pipe",
    "PipelineStage",
    "XlaPipelineStage",
    "clip_grad_norm_",
    "move_factories_to",
    "trace_and_split",
]
