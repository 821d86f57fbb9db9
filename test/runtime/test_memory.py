"""A stage keeps no more microbatches alive than its schedule implies."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime.training import Job, Model, batch, build, make_schedule, mesh_of, run_step

from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds


def implied(schedule: Any, stage: int) -> int:
    """Return the most microbatches of a stage that its rank's order leaves open."""
    most = alive = 0
    for action in schedule.pipeline_order[dist.get_rank()]:
        if action is not None and action.stage_index == stage:
            # A weight action frees what is left of a microbatch, not its inputs.
            alive += {"F": 1, "B": -1, "I": -1, "W": 0}[str(action.computation_type)]
            most = max(most, alive)
    return most


def most_alive(job: Job) -> tuple[list[int], list[int]]:
    """Return for each stage the most microbatches that waited for their backward.

    Then the same as the schedule's order implies it.
    """
    dist.init_process_group("xla_pp")
    torch.manual_seed(0)
    stages = build(job, Model(job.num_stages), mesh_of(job))
    found = [0] * len(stages)

    def count(index: int, stage: Any, forward: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            found[index] = max(found[index], len(stage._live))
            return output

        return counting

    for index, stage in enumerate(stages):
        stage.forward_one_chunk = count(index, stage, stage.forward_one_chunk)
    schedule = make_schedule(job, stages)
    for step in range(2):
        run_step(job, schedule, stages, *batch(job, step))
        held = [(s._live, s._residuals, s._leaves) for s in stages]
        assert held == [({}, {}, {})] * len(stages)
        assert stages[0]._pg.mailbox == {}
    is_single = len(stages) == 1
    return found, [] if is_single else [
        implied(schedule, stage.stage_index) for stage in stages
    ]


@pytest.mark.parametrize(
    ("schedule", "expected"), [("GPipe", (6, 6)), ("1F1B", (2, 1))]
)
def test_gpipe_keeps_all_microbatches_and_1f1b_one_per_later_stage(
    worlds: Worlds, schedule: str, expected: tuple[int, int]
) -> None:
    job = Job(schedule=schedule, frontend="manual", num_microbatches=6, rows=12)
    found = worlds.run(most_alive, ranks=2, args=(job,))
    assert tuple(alive for (alive,), _ in found) == expected


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_stages_of_one_rank_keep_what_the_order_implies(
    worlds: Worlds, schedule: str
) -> None:
    job = Job(schedule=schedule, frontend="manual", num_microbatches=6, rows=12)
    for found, expected in worlds.run(most_alive, ranks=2, args=(job,)):
        assert found == expected
        assert max(found) < 6
