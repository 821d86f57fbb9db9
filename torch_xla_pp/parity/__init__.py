"""Whether a pipeline computes what the unsplit model does."""

from torch_xla_pp.parity.comparison import verify
from torch_xla_pp.parity.verification import Difference, Verification

__all__ = ["Difference", "Verification", "verify"]
