"""Pipeline parallelism over SPMD worlds for PyTorch/XLA.

Scripts written for `torch.distributed.pipelining` run on XLA devices: every rank of
torchrun is one SPMD world, runs its own stages as compiled programs, and is driven by
torch's own schedule classes. Importing this package registers the process-group
backend "xla_pp".
"""

# ruff: noqa: E402, I001  (defaults are set before torch_xla is loaded)
import sys

from torch_xla_pp.env import set_defaults

set_defaults()

# `python -m torch_xla_pp` only reads and writes files: without torch it starts at once.
if sys.orig_argv[1:3] != ["-m", "torch_xla_pp"]:
    from torch_xla_pp.errors import (
        CheckpointError,
        PipelineError,
        PlanError,
        ScheduleError,
        StageShapeError,
        TransportError,
        TransportTimeout,
    )
    from torch_xla_pp.graph import deferred_init, materialize, pipeline_yield, shard
    from torch_xla_pp.launch import device, init_device_mesh
    from torch_xla_pp.mesh import AxisRules, striped_positions
    from torch_xla_pp.pipeline import Pipe, pipeline
    from torch_xla_pp.runtime import (
        PipelineStage,
        ScheduleFromTable,
        clip_grad_norm_,
        profile_step,
    )
    from torch_xla_pp.schedule import Action, Schedule
    from torch_xla_pp.spmd_pipeline import spmd_pipeline
    from torch_xla_pp import checkpoint, xla_compat

    xla_compat.size_pool()

__all__ = [
    "Action",
    "AxisRules",
    "CheckpointError",
    "Pipe",
    "PipelineError",
    "PipelineStage",
    "PlanError",
    "Schedule",
    "ScheduleError",
    "ScheduleFromTable",
    "StageShapeError",
    "TransportError",
    "TransportTimeout",
    "checkpoint",
    "clip_grad_norm_",
    "deferred_init",
    "device",
    "init_device_mesh",
    "materialize",
    "pipeline",
    "pipeline_yield",
    "profile_step",
    "shard",
    "spmd_pipeline",
    "striped_positions",
]
