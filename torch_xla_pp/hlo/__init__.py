"""Readers of XLA's own texts: shardings, collectives, products."""

from torch_xla_pp.hlo.collectives import Collective, axes_of_groups, collectives_of
from torch_xla_pp.hlo.product_flops import product_flops
from torch_xla_pp.hlo.sharding import (
    REPLICATED,
    OpShardingArgs,
    parse_sharding,
    stacked,
)

__all__ = [
    "Collective",
    "OpShardingArgs",
    "REPLICATED",
    "axes_of_groups",
    "collectives_of",
    "parse_sharding",
    "product_flops",
    "stacked",
]
