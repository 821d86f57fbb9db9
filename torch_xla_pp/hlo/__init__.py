"""XLA's own forms: shardings, collectives and products are read, calls written."""

from torch_xla_pp.hlo.collectives import Collective, axes_of_groups, collectives_of
from torch_xla_pp.hlo.placed_calls import Handlers, Placed, place_calls
from torch_xla_pp.hlo.product_flops import product_flops
from torch_xla_pp.hlo.sharding import (
    REPLICATED,
    OpShardingArgs,
    parse_sharding,
    stacked,
)
from torch_xla_pp.hlo.written_call import CallShape, written_call

__all__ = [
    "CallShape",
    "Collective",
    "Handlers",
    "OpShardingArgs",
    "Placed",
    "REPLICATED",
    "axes_of_groups",
    "collectives_of",
    "parse_sharding",
    "place_calls",
    "product_flops",
    "stacked",
    "written_call",
]
