"""The last backward of a step sends before the rest of it: with the same numbers.

So it is under GPipe and 1F1B, whose last rank ends with a backward that others wait
for.
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
RECORDED = 6
ALTERNATING = [f"{kind}{i}" for i in range(4) for kind in "FB"]


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
    """Train stages while layers are frozen for a step, and another is recorded."""
    join()
    torch.manual_seed(0)
    reference = Model(job.num_stages)
    stages = build(job, copy.deepcopy(reference), mesh_of(job))
    schedule = make_schedule(job, stages)
    last, rank = stages[-1], dist.get_rank()
    found: dict[str, Any] = {"free": [], "live": [], "errors": []}
    for step in range(8):
        own = [pair for stage in stages for pair in stage.submod.named_parameters()]
        for name, parameter in own:
            parameter.requires_grad_(step != 4 or "up" not in name)
        x, y = batch(job, step)
        if step == RECORDED:
            with xpp.profile_step(schedule) as profile:
                run_step(job, schedule, stages, x, y)
            spans = [s for s in profile.timeline.spans if s.rank == rank]
            found["recorded"] = [
                f"{s.kind}{s.microbatch}" for s in spans if s.stage == last.stage_index
            ]
        else:
            run_step(job, schedule, stages, x, y)
        found["free"].append(last.saved.free_bytes)
        found["live"].append(last.peak_memory().num_live)
        loss_fn(reference(x), y).backward()
        named = dict(reference.named_parameters())
        for name, parameter in own:
            assert (parameter.grad is not None) == parameter.requires_grad
            if parameter.grad is not None:
                difference = parameter.grad.cpu() - named[name].grad
                found["errors"].append(float(difference.abs().max()))
            parameter.grad = None
        reference.zero_grad()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("schedule", "rank", "recorded", "num_live"),
    [
        ("1F1B", 1, ALTERNATING, 1),
        ("GPipe", 1, [f"{kind}{i}" for kind in "FB" for i in range(4)], 4),
        ("DualPipeV", 0, ["F0", "I0", "W0", *ALTERNATING[2:]], 1),
    ],
)
def test_what_changes_between_steps_counts_and_memory_does_not_grow(
    worlds: Worlds, schedule: str, rank: int, recorded: list[str], num_live: int
) -> None:
    job = Job(
        frontend="manual", schedule=schedule, takes_outputs=False, evaluates=False
    )
    every = worlds.run(train_and_change, ranks=2, devices=1, args=(job,))
    for found in every:
        assert max(found["errors"]) < 1e-5
        assert found["free"][1] == found["free"][2] == found["free"][3]
    if schedule == "1F1B":
        assert every[0]["live"] == [2] * 8
    # A recorded step has the backward as one action, where the schedule has it.
    found = every[rank]
    assert found["recorded"] == recorded
    assert found["live"][RECORDED] == num_live
    found["live"].pop(RECORDED)
    assert found["live"] == [1] * 7
