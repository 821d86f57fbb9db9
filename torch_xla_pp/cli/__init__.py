"""The command line: schedules, simulated steps and recorded ones, without devices."""

from torch_xla_pp.cli.commands import main

__all__ = ["main"]
