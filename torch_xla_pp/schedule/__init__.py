"""WHEN: the order of actions on each rank, as data."""

from torch_xla_pp.schedule.action import KINDS, Action, Kind
from torch_xla_pp.schedule.builders.list_scheduling import dag_1f1b, list_schedule
from torch_xla_pp.schedule.builders.looped import (
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zb1p,
)
from torch_xla_pp.schedule.builders.v_shaped import dualpipev, zbv
from torch_xla_pp.schedule.edges import carriers_of, chain_of, givers_of
from torch_xla_pp.schedule.live import peak_live
from torch_xla_pp.schedule.schedule import Schedule
from torch_xla_pp.schedule.verify.verify import verify

__all__ = [
    "Action",
    "KINDS",
    "Kind",
    "Schedule",
    "carriers_of",
    "chain_of",
    "dag_1f1b",
    "dualpipev",
    "givers_of",
    "gpipe",
    "interleaved_1f1b",
    "list_schedule",
    "one_f_one_b",
    "peak_live",
    "verify",
    "zb1p",
    "zbv",
]
