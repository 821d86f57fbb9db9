"""HOW values get to other stages: channels, one for each edge."""

from torch_xla_pp.channels.channel import (
    Channel,
    Edge,
    Endpoint,
    borders_of,
    returned_for,
    run_with,
)
from torch_xla_pp.channels.links import Links, StageValues
from torch_xla_pp.channels.observer import Marks, Observer

__all__ = [
    "Channel",
    "Edge",
    "Endpoint",
    "Links",
    "Marks",
    "Observer",
    "StageValues",
    "borders_of",
    "returned_for",
    "run_with",
]
