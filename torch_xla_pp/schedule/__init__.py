"""WHEN: the order of actions on each rank, as data."""

from torch_xla_pp.schedule.action import KINDS, Action, Kind
from torch_xla_pp.schedule.builders.list_scheduling import (
    Delivery,
    dag_1f1b,
    list_schedule,
    listed_actions,
)
from torch_xla_pp.schedule.builders.looped import (
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zb1p,
)
from torch_xla_pp.schedule.builders.v_shaped import dualpipev, zbv
from torch_xla_pp.schedule.edges import (
    carriers_of,
    chain_of,
    givers_of,
    possible_carriers,
)
from torch_xla_pp.schedule.live import peak_live
from torch_xla_pp.schedule.schedule import Schedule
from torch_xla_pp.schedule.verify.verify import verify

__all__ = [
    "Action",
    "Delivery",
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
    "listed_actions",
    "one_f_one_b",
    "peak_live",
    "possible_carriers",
    "verify",
    "zb1p",
    "zbv",
]
