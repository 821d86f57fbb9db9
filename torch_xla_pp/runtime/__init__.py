"""RUN: stages that torch's own schedule classes drive."""

from torch_xla_pp.runtime.gradients.norm import clip_grad_norm_
from torch_xla_pp.runtime.gradients.sums import SumPrograms
from torch_xla_pp.runtime.rank import RankPipeline
from torch_xla_pp.runtime.schedule_table import ScheduleFromTable
from torch_xla_pp.runtime.stage import PipelineStage
from torch_xla_pp.runtime.stage_model import TracedModel
from torch_xla_pp.runtime.step_losses import losses, metrics
from torch_xla_pp.runtime.wrong_input import check_plain_module

__all__ = [
    "PipelineStage",
    "RankPipeline",
    "ScheduleFromTable",
    "SumPrograms",
    "TracedModel",
    "check_plain_module",
    "clip_grad_norm_",
    "losses",
    "metrics",
]
