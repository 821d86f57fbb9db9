"""Timelines of real steps, recorded on all ranks."""

from torch_xla_pp.profile.profile_step import StepProfile, profile_step

__all__ = ["StepProfile", "profile_step"]
