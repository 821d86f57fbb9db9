"""A stage keeps no more microbatches alive than its schedule implies."""

import weakref
from typing import Any

import pytest
import torch.distributed as dist
from runtime.training import Job, Model, Part, batch, run_step, start

from torch_xla_pp import xla_compat
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds


def implied(schedule: Any, stage: int) -> int:
    """Return the most microbatches of a stage that its rank's order leaves open."""
    most = alive = 0
    actions = [a for a in schedule.pipeline_order[dist.get_rank()] if a is not None]
    for action in (part for a in actions for part in a.sub_actions or (a,)):
        if action.stage_index == stage:
            # A weight action frees what is left of a microbatch, not its inputs.
            alive += {"F": 1, "B": -1, "I": -1, "W": 0}[str(action.computation_type)]
            most = max(most, alive)
    return most


def most_alive(job: Job) -> tuple[list[int], list[int]]:
    """Return for each stage the most microbatches that waited for their backward.

    Then the same as the schedule's order implies it.
    """
    stages, schedule = start(job)
    for step in range(2):
        run_step(job, schedule, stages, *batch(job, step))
        for stage in stages:
            kept = job.num_microbatches if stage.is_last else 0
            assert (len(stage._shelf), stage._outlet._leaves) == (kept, {})
        assert stages[0]._pg.mailbox == {}
    found = [stage.peak_memory().num_live for stage in stages]
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


@pytest.mark.parametrize(
    "schedule",
    ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
)
def test_stages_of_one_rank_keep_what_the_order_implies(
    worlds: Worlds, schedule: str
) -> None:
    job = Job(schedule=schedule, frontend="manual", num_microbatches=6, rows=12)
    for found, expected in worlds.run(most_alive, ranks=2, args=(job,)):
        assert found == expected
        assert max(found) < 6


def bytes_of_a_step(schedule: str) -> tuple[Any, int, list[bool]]:
    """Return the report, a microbatch's bytes, and which saved values are gone."""
    job = Job(
        schedule=schedule, frontend="manual", num_microbatches=6, rows=12, devices=2
    )
    (stage,), runner = start(job)
    put, seen, saved = stage._shelf.put, [], 0

    def watching(kind: str, microbatch: int, values: Any, sizes: Any) -> None:
        nonlocal saved
        seen.extend(weakref.ref(value) for value in values.values())
        if microbatch == 0:
            shards = xla_compat.read_shards(list(values.values()))
            saved = sum(s[0].numel() * s[0].element_size() for s in shards)
        put(kind, microbatch, values, sizes)

    run_step(job, runner, [stage], *batch(job, 0))
    stage._shelf.put = watching
    run_step(job, runner, [stage], *batch(job, 1))
    # What a program reads lives until it has run.
    xla_compat.wait_device()
    return stage.peak_memory(), saved, [ref() is None for ref in seen]


@pytest.mark.parametrize(("schedule", "most"), [("GPipe", 6), ("1F1B", 2)])
def test_the_report_counts_bytes_on_one_device(
    worlds: Worlds, schedule: str, most: int
) -> None:
    runs = worlds.run(bytes_of_a_step, ranks=2, devices=2, args=(schedule,))
    memory, saved, gone = runs[0]
    assert all(gone)
    assert memory.num_live == most
    assert memory.saved_bytes == most * saved
    module = Part(Model(2), 0)
    # Parameters and gradients are replicated here.
    assert memory.state_bytes == 8 * sum(p.numel() for p in module.parameters())
    assert "MiB on a device" in str(memory)
