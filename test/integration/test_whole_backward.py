"""Backwards of inputs and of weights in a row are one program, if nobody waits."""

from dataclasses import replace

import pytest
import torch.distributed as dist
from integration.test_parity import check
from integration.training import (
    Job,
    Model,
    batch,
    build,
    make_schedule,
    mesh_of,
    run_step,
    train,
)
from joining import join

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

PARTS = {"backward input", "backward weight"}
# No stage is before stage 0, and stage 1, before stage 2, is of the same rank.
ZBV = Job(frontend="manual", schedule="ZBVZeroBubble", takes_outputs=False)


@pytest.mark.parametrize("transport", ["", "host"])
@pytest.mark.parametrize("takes_outputs", [False, True])
def test_gradients_are_those_of_the_model(
    worlds: Worlds, takes_outputs: bool, transport: str
) -> None:
    job = replace(ZBV, takes_outputs=takes_outputs, transport=transport)
    reports = worlds.run(train, ranks=2, devices=1, args=(job,))
    check(reports)
    # Those of stages 0 and 1.
    names = [{p.name for p in report.explanation.programs} for report in reports]
    assert "backward" in names[0]
    assert PARTS.isdisjoint(names[0])
    assert "backward" not in names[1]
    assert names[1] >= PARTS


def record(job: Job) -> dict[int, set[str]]:
    """Return the programs of each stage after two steps, and record a third."""
    join()
    rank = dist.get_rank()
    stages = build(job, Model(job.num_stages), mesh_of(job))
    schedule = make_schedule(job, stages)
    x, y = batch(job, 0)
    for _ in range(2):
        run_step(job, schedule, stages, x, y)
    found = {s.stage_index: {p.name for p in s.explain().programs} for s in stages}
    with xpp.profile_step(schedule) as profile:
        run_step(job, schedule, stages, x, y)
    spans = [s for s in profile.timeline.spans if s.rank == rank]
    assert {"F", "I", "W"} == {s.kind for s in spans}
    dist.destroy_process_group()
    return found


def test_a_recorded_step_has_them_apart(worlds: Worlds) -> None:
    first, middle = worlds.run(record, ranks=2, devices=1, args=(ZBV,))
    assert "backward" in first[0]
    assert PARTS.isdisjoint(first[0])
    assert "backward" not in first[3]  # rank 1 waits for its gradients
    assert "backward" in middle[2]
    assert "backward" not in middle[1]
