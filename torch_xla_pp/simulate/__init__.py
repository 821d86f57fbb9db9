"""Predict the timeline of a step from its schedule and the costs of its actions."""

from torch_xla_pp.simulate.calibration import Calibration
from torch_xla_pp.simulate.costs import (
    Costs,
    Flow,
    chain_flows,
    edge_flows,
    stage_seconds,
)
from torch_xla_pp.simulate.estimated import estimated_costs
from torch_xla_pp.simulate.expected import expected_step_s
from torch_xla_pp.simulate.job_links import AxisLink, JobLinks, ring_all_reduce_s
from torch_xla_pp.simulate.listed import listed_step
from torch_xla_pp.simulate.measured import measured_costs, measured_network
from torch_xla_pp.simulate.network import Link, Network
from torch_xla_pp.simulate.routes import Routes
from torch_xla_pp.simulate.scaled_seconds import (
    ActionSeconds,
    even_stages,
    scaled_seconds,
)
from torch_xla_pp.simulate.seconds import StepOrder, step_seconds
from torch_xla_pp.simulate.simulation import simulate

__all__ = [
    "ActionSeconds",
    "AxisLink",
    "Calibration",
    "Costs",
    "Flow",
    "JobLinks",
    "Link",
    "Network",
    "Routes",
    "StepOrder",
    "chain_flows",
    "edge_flows",
    "estimated_costs",
    "even_stages",
    "expected_step_s",
    "listed_step",
    "measured_costs",
    "measured_network",
    "ring_all_reduce_s",
    "scaled_seconds",
    "simulate",
    "stage_seconds",
    "step_seconds",
]
