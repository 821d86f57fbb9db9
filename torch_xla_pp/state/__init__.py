"""The values that a stage holds on its devices: its module's, and saved activations."""

from torch_xla_pp.state.donated import DonatedValues
from torch_xla_pp.state.gathered_weights import GatheredWeights
from torch_xla_pp.state.module_state import ModuleState
from torch_xla_pp.state.saved import (
    HeldBytes,
    SavedKind,
    SavedValues,
    StageMemory,
    optimizer_bytes,
)

__all__ = [
    "DonatedValues",
    "GatheredWeights",
    "HeldBytes",
    "ModuleState",
    "SavedKind",
    "SavedValues",
    "StageMemory",
    "optimizer_bytes",
]
