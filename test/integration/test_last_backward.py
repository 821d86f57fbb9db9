"""The last backward of a step sends before the rest of it: with the same numbers.

So it is under 1F1B, whose last rank ends with a backward that others wait for.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from integration.test_parity import check
from integration.training import (
    Job,
    Model,
    batch,
    build,
    loss_fn,
    make_schedule,
    mesh_of,
    run_step,
    train,
)
from joining import join

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

ONE = "forward and backward"
PARTS = {"forward and backward input", "backward weight"}


@pytest.mark.parametrize("transport", ["", "host"])
@pytest.mark.parametrize(("ranks", "num_microbatches"), [(2, 4), (4, 8)])
def test_the_last_stage_has_programs_for_it(
    worlds: Worlds, ranks: int, num_microbatches: int, transport: str
) -> None:
    job = Job(
        frontend="manual",
        ranks=ranks,
        num_microbatches=num_microbatches,
        transport=transport,
        takes_outputs=False,
    )
    reports = worlds.run(train, ranks=ranks, devices=1, args=(job,))
    check(reports)
    for report in reports[:-1]:
        names = {p.name for p in report.explanation.programs}
        assert names.isdisjoint({ONE, *PARTS})
    assert {ONE, *PARTS} <= reports[-1].programs
    assert "backward" not in reports[-1].programs


def train_and_change(job: Job) -> dict[str, Any]:
    """Train a stage while layers are frozen for a step, and another is recorded."""
    join()
    torch.manual_seed(0)
    reference = Model(job.num_stages)
    stages = build(job, copy.deepcopy(reference), mesh_of(job))
    schedule = make_schedule(job, stages)
    (stage,), rank = stages, dist.get_rank()
    found: dict[str, Any] = {"free": [], "live": [], "errors": []}
    for step in range(8):
        for name, parameter in stage.submod.named_parameters():
            parameter.requires_grad_(step != 4 or "up" not in name)
        x, y = batch(job, step)
        if step == 6:
            with xpp.profile_step(schedule) as profile:
                run_step(job, schedule, stages, x, y)
            spans = [s for s in profile.timeline.spans if s.rank == rank]
            found["recorded"] = [f"{s.kind}{s.microbatch}" for s in spans]
        else:
            run_step(job, schedule, stages, x, y)
        found["free"].append(stage.saved.free_bytes)
        found["live"].append(stage.peak_memory().num_live)
        loss_fn(reference(x), y).backward()
        named = dict(reference.named_parameters())
        for name, parameter in stage.submod.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad
            if parameter.grad is not None:
                difference = parameter.grad.cpu() - named[name].grad
                found["errors"].append(float(difference.abs().max()))
            parameter.grad = None
        reference.zero_grad()
    dist.destroy_process_group()
    return found


def test_what_changes_between_steps_counts_and_memory_does_not_grow(
    worlds: Worlds,
) -> None:
    job = Job(frontend="manual", takes_outputs=False, evaluates=False)
    found = worlds.run(train_and_change, ranks=2, devices=1, args=(job,))
    for rank, own in enumerate(found):
        assert max(own["errors"]) < 1e-5
        assert own["live"] == [2 - rank] * 8
        assert own["free"][1] == own["free"][2] == own["free"][3]
    # A recorded step has the backward as one action.
    assert found[1]["recorded"] == [f"{k}{i}" for i in range(4) for k in "FB"]
