"""Plan how to cut a model into stages, and how to run them."""

from torch_xla_pp.planner.checks import check
from torch_xla_pp.planner.devices import (
    DEVICES,
    Cluster,
    DeviceSpec,
    link_between_ranks,
)
from torch_xla_pp.planner.evaluation import RankBytes
from torch_xla_pp.planner.example_rows import with_rows
from torch_xla_pp.planner.measured_costs import (
    MeasuredCosts,
    RowSeconds,
    WorkSeconds,
)
from torch_xla_pp.planner.orders import SCHEDULES
from torch_xla_pp.planner.parameter_rules import ParameterRules
from torch_xla_pp.planner.pictures import draw_candidates, draw_memory, to_dot
from torch_xla_pp.planner.plan import PipelinePlan
from torch_xla_pp.planner.plan_values import (
    Alternative,
    Candidate,
    CostSource,
    PlannedBatch,
    PlannedLink,
    PlannedModel,
    PlannedRank,
    PlannedSchedule,
    PlannedStage,
    PredictedCollective,
    PredictedRank,
    PredictedStage,
    Prediction,
    SearchCounts,
)
from torch_xla_pp.planner.planning import make_plan, optimizer_ratio
from torch_xla_pp.planner.rank_links import RankLinks
from torch_xla_pp.planner.report import candidates_text, differences
from torch_xla_pp.planner.settings import PLANNERS
from torch_xla_pp.planner.strategies import PRESETS

__all__ = [
    "Alternative",
    "Candidate",
    "Cluster",
    "CostSource",
    "DEVICES",
    "DeviceSpec",
    "PLANNERS",
    "MeasuredCosts",
    "PRESETS",
    "ParameterRules",
    "PipelinePlan",
    "PlannedBatch",
    "PlannedLink",
    "PlannedModel",
    "PlannedRank",
    "PlannedSchedule",
    "PlannedStage",
    "PredictedCollective",
    "PredictedRank",
    "PredictedStage",
    "Prediction",
    "RankBytes",
    "RankLinks",
    "RowSeconds",
    "SCHEDULES",
    "SearchCounts",
    "WorkSeconds",
    "candidates_text",
    "check",
    "differences",
    "draw_candidates",
    "draw_memory",
    "link_between_ranks",
    "make_plan",
    "optimizer_ratio",
    "to_dot",
    "with_rows",
]
