"""The names that users may import; changing them is a decision."""

import inspect

import pytest

import torch_xla_pp as xpp

pytestmark = pytest.mark.pure

PUBLIC = [
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


def test_the_public_names_are_these() -> None:
    assert sorted(xpp.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(xpp, name))


def test_signatures_are_upstreams() -> None:
    """A script may pass what it passes to torch.distributed.pipelining."""
    from torch.distributed import pipelining

    for ours, theirs in (
        (xpp.pipeline, pipelining.pipeline),
        (xpp.PipelineStage, pipelining.PipelineStage),
        (xpp.Pipe.build_stage, pipelining.Pipe.build_stage),
    ):
        names = list(inspect.signature(theirs).parameters)
        assert list(inspect.signature(ours).parameters)[: len(names)] == names
