"""Pipeline parallelism over SPMD worlds for PyTorch/XLA.

Scripts written for `torch.distributed.pipelining` run on XLA devices: every rank of
torchrun is one SPMD world, runs its own stages as compiled programs, and is driven by
torch's own schedule classes. Importing this package registers the process-group
backend "xla_pp"; torch_xla is loaded when a name of it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torch_xla_pp.on_import import prepare_process

if TYPE_CHECKING:
    from torch_xla_pp import checkpoint
    from torch_xla_pp.advice import Advice, advise
    from torch_xla_pp.deferred import deferred_init, materialize
    from torch_xla_pp.errors import (
        CheckpointError,
        PipelineError,
        PlanError,
        ScheduleError,
        StageShapeError,
        TransportError,
        TransportTimeout,
    )
    from torch_xla_pp.fitting import Fit, fit
    from torch_xla_pp.graph import attention, pipeline_yield, shard
    from torch_xla_pp.health import doctor
    from torch_xla_pp.launch import device, init_device_mesh
    from torch_xla_pp.length_buckets import LengthBuckets
    from torch_xla_pp.measuring import measure_work
    from torch_xla_pp.mesh import AxisRules, striped_positions
    from torch_xla_pp.padding import pad_batch
    from torch_xla_pp.parity import verify
    from torch_xla_pp.phases import note_phases
    from torch_xla_pp.pipe import Pipe, pipeline
    from torch_xla_pp.planner import PipelinePlan, make_plan
    from torch_xla_pp.profile import profile_step
    from torch_xla_pp.runtime import (
        PipelineStage,
        ScheduleFromTable,
        clip_grad_norm_,
        losses,
        metrics,
    )
    from torch_xla_pp.schedule import Action, Schedule
    from torch_xla_pp.spmd import spmd_pipeline
    from torch_xla_pp.tracing import trace_work

__all__ = [
    "Action",
    "Advice",
    "AxisRules",
    "CheckpointError",
    "Fit",
    "LengthBuckets",
    "Pipe",
    "PipelineError",
    "PipelinePlan",
    "PipelineStage",
    "PlanError",
    "Schedule",
    "ScheduleError",
    "ScheduleFromTable",
    "StageShapeError",
    "TransportError",
    "TransportTimeout",
    "advise",
    "attention",
    "checkpoint",
    "clip_grad_norm_",
    "deferred_init",
    "device",
    "doctor",
    "fit",
    "init_device_mesh",
    "losses",
    "make_plan",
    "materialize",
    "measure_work",
    "metrics",
    "note_phases",
    "pad_batch",
    "pipeline",
    "pipeline_yield",
    "profile_step",
    "shard",
    "spmd_pipeline",
    "striped_positions",
    "trace_work",
    "verify",
]

_HOMES = {
    "advice": ("Advice", "advise"),
    "deferred": ("deferred_init", "materialize"),
    "errors": (
        "CheckpointError",
        "PipelineError",
        "PlanError",
        "ScheduleError",
        "StageShapeError",
        "TransportError",
        "TransportTimeout",
    ),
    "fitting": ("Fit", "fit"),
    "graph": ("attention", "pipeline_yield", "shard"),
    "health": ("doctor",),
    "launch": ("device", "init_device_mesh"),
    "length_buckets": ("LengthBuckets",),
    "measuring": ("measure_work",),
    "mesh": ("AxisRules", "striped_positions"),
    "padding": ("pad_batch",),
    "parity": ("verify",),
    "phases": ("note_phases",),
    "pipe": ("Pipe", "pipeline"),
    "planner": ("PipelinePlan", "make_plan"),
    "profile": ("profile_step",),
    "runtime": (
        "PipelineStage",
        "ScheduleFromTable",
        "clip_grad_norm_",
        "losses",
        "metrics",
    ),
    "schedule": ("Action", "Schedule"),
    "spmd": ("spmd_pipeline",),
    "tracing": ("trace_work",),
}
_ROOMS = ("checkpoint",)
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the module that defines a name, when the name is first used."""
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOME_OF[name]}")
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


prepare_process()
