"""What bounds a pipeline, products or links, and what to change.

Terms: the *arithmetic intensity* of an exchange is the work that there is for each byte
that a device sends for it. A machine's intensity is its FLOP/s by the bytes/s of the
link. Where an exchange has less, the link is busy longer than the units for products.

Sources: MaxText's guide to sharding, https://maxtext.readthedocs.io (Optimization,
Sharding on TPUs), and "How to Scale Your Model", https://jax-ml.github.io/scaling-book/
(parts 3 and 5), which derive what each strategy has.
"""

from torch_xla_pp.advice.bounds import Bound, Change
from torch_xla_pp.advice.exchanges import Exchange, moved_bytes, whole_bytes
from torch_xla_pp.advice.findings import Advice, advise
from torch_xla_pp.advice.machine import Machine
from torch_xla_pp.advice.stage_loads import (
    PipelineLoad,
    StageLoad,
    counted_once,
    when_of,
)

__all__ = [
    "Advice",
    "Bound",
    "Change",
    "Exchange",
    "Machine",
    "PipelineLoad",
    "StageLoad",
    "advise",
    "moved_bytes",
    "counted_once",
    "when_of",
    "whole_bytes",
]
