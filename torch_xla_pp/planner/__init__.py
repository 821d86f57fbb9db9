"""Find out how to cut a model into stages, and how to run them."""

from torch_xla_pp.planner.checks import check
from torch_xla_pp.planner.devices import (
    DEVICES,
    Cluster,
    DeviceSpec,
    link_between_ranks,
)
from torch_xla_pp.planner.evaluation import RankBytes
from torch_xla_pp.planner.orders import SCHEDULES
from torch_xla_pp.planner.plan import PipelinePlan
from torch_xla_pp.planner.plan_values import (
    Alternative,
    CostSource,
    PlannedBatch,
    PlannedLink,
    PlannedModel,
    PlannedRank,
    PlannedSchedule,
    PlannedStage,
    PredictedRank,
    PredictedStage,
    Prediction,
    SearchCounts,
)
from torch_xla_pp.planner.planning import make_plan
from torch_xla_pp.planner.rank_links import RankLinks
from torch_xla_pp.planner.report import differences
from torch_xla_pp.planner.settings import PLANNERS
from torch_xla_pp.planner.strategies import PRESETS

__all__ = [
    "Alternative",
    "Cluster",
    "CostSource",
    "DEVICES",
    "DeviceSpec",
    "PLANNERS",
    "PRESETS",
    "PipelinePlan",
    "PlannedBatch",
    "PlannedLink",
    "PlannedModel",
    "PlannedRank",
    "PlannedSchedule",
    "PlannedStage",
    "PredictedRank",
    "PredictedStage",
    "Prediction",
    "RankBytes",
    "RankLinks",
    "SCHEDULES",
    "SearchCounts",
    "check",
    "differences",
    "link_between_ranks",
    "make_plan",
]
