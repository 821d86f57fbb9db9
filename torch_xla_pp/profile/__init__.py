"""Timelines of real steps, recorded on all ranks."""

from torch_xla_pp.profile.step_profile import StepProfile, profile_step

__all__ = ["StepProfile", "profile_step"]
