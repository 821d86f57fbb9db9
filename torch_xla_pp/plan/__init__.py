"""WHO: which values each stage needs from which others, and their ranks. Pure."""

from torch_xla_pp.plan.claims import (
    Claim,
    ReplicaClaim,
    StageClaim,
    replica_faults,
    wiring_of,
)
from torch_xla_pp.plan.consumers import Consumers, Value
from torch_xla_pp.plan.stage_inputs import InputsFrom, SourceLike, StageInputs
from torch_xla_pp.plan.stage_plan import (
    Offer,
    StagePlan,
    StagePlanner,
    Tilings,
    check_kwargs,
    check_no_grad,
    describe_all,
)
from torch_xla_pp.plan.step_kind import (
    Arguments,
    KindNumbers,
    Mode,
    autocast_dtype,
    random_seed,
)
from torch_xla_pp.plan.wiring import Wiring

__all__ = [
    "Arguments",
    "Claim",
    "Consumers",
    "InputsFrom",
    "KindNumbers",
    "Mode",
    "Offer",
    "ReplicaClaim",
    "SourceLike",
    "StageClaim",
    "StageInputs",
    "StagePlan",
    "StagePlanner",
    "Tilings",
    "Value",
    "Wiring",
    "autocast_dtype",
    "check_kwargs",
    "check_no_grad",
    "describe_all",
    "random_seed",
    "replica_faults",
    "wiring_of",
]
