"""RUN: stages that torch's own schedule classes drive."""

from torch_xla_pp.runtime.checks import check_plain_module
from torch_xla_pp.runtime.gradients.norm import clip_grad_norm_
from torch_xla_pp.runtime.manual_stage import PipelineStage
from torch_xla_pp.runtime.module_state import shapes_of
from torch_xla_pp.runtime.orders import order_of
from torch_xla_pp.runtime.profile import profile_step
from torch_xla_pp.runtime.schedule_table import ScheduleFromTable
from torch_xla_pp.runtime.stage import XlaPipelineStage
from torch_xla_pp.runtime.torch_compat import (
    SPLIT_MARK,
    Pipe,
    move_factories_to,
    trace_and_split,
)

__all__ = [
    "Pipe",
    "PipelineStage",
    "SPLIT_MARK",
    "ScheduleFromTable",
    "XlaPipelineStage",
    "check_plain_module",
    "clip_grad_norm_",
    "move_factories_to",
    "order_of",
    "profile_step",
    "shapes_of",
    "trace_and_split",
]
