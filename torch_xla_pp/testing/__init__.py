"""Run functions in every rank of a real job, for tests."""

from torch_xla_pp.testing.worlds import Outcome, Worlds, WorldsFailed

__all__ = ["Outcome", "Worlds", "WorldsFailed"]
