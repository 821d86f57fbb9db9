"""Run functions in every rank of a real job, and pause in programs, for tests."""

from torch_xla_pp.testing.pause import pause
from torch_xla_pp.testing.worlds import Outcome, Worlds, WorldsFailed

__all__ = ["Outcome", "Worlds", "WorldsFailed", "pause"]
