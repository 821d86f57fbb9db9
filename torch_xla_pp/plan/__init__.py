"""WHO: which stage needs what of which other one, and on which ranks they are."""

from torch_xla_pp.plan.fan import Fan, Value
from torch_xla_pp.plan.stage_inputs import InputsFrom, SourceLike, StageInputs
from torch_xla_pp.plan.wiring import Wiring

__all__ = [
    "Fan",
    "InputsFrom",
    "SourceLike",
    "StageInputs",
    "Value",
    "Wiring",
]
