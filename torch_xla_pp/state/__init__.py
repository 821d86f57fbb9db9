"""What a stage holds on its devices: its module's values, and saved activations."""

from torch_xla_pp.state.module_state import ModuleState
from torch_xla_pp.state.saved import (
    HeldBytes,
    SavedKind,
    SavedValues,
    StageMemory,
    optimizer_bytes,
    total_bytes,
)

__all__ = [
    "HeldBytes",
    "ModuleState",
    "SavedKind",
    "SavedValues",
    "StageMemory",
    "optimizer_bytes",
    "total_bytes",
]
