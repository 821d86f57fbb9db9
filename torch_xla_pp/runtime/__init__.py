"""RUN: stages that torch's own schedule classes drive."""

from torch_xla_pp.runtime.gradients.norm import clip_grad_norm_
from torch_xla_pp.runtime.observer import Marks, Observer
from torch_xla_pp.runtime.rank import RankPipeline
from torch_xla_pp.runtime.saved import SavedValues, StageMemory
from torch_xla_pp.runtime.schedule_table import ScheduleFromTable
from torch_xla_pp.runtime.stage import PipelineStage
from torch_xla_pp.runtime.stage_model import TracedModel
from torch_xla_pp.runtime.wrong_input import check_plain_module
from torch_xla_pp.torch_compat import TorchSchedule, order_of

__all__ = [
    "Marks",
    "Observer",
    "PipelineStage",
    "RankPipeline",
    "SavedValues",
    "ScheduleFromTable",
    "StageMemory",
    "TorchSchedule",
    "TracedModel",
    "check_plain_module",
    "clip_grad_norm_",
    "order_of",
]
