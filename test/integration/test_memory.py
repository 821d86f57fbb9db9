"""A stage keeps no more alive than its schedule implies, and says how much it is."""

import statistics
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_xla
from integration.training import Job, Model, Part, batch, run_step, start
from joining import join
from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp import cpu, xla_compat
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

# Schedules that compute gradients of inputs and of weights apart.
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


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
            assert (len(stage.saved), len(stage.outputs)) == (kept, 0)
        assert stages[0].process_group.mailbox == {}
    own = [stage.peak_memory() for stage in stages]
    together = stages[0].rank_memory()
    held = [memory.held_bytes for memory in own]
    free_bytes = stages[0].saved.free_bytes
    assert max(held) <= together.held_bytes <= sum(held) + free_bytes
    assert together.state_bytes == sum(memory.state_bytes for memory in own)
    assert together == stages[-1].rank_memory()
    assert (together.passed_bytes > 0) == (job.schedule in SPLIT)
    found = [memory.num_live for memory in own]
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
    put, seen, saved = stage.saved.put, [], 0

    def watching(kind: str, microbatch: int, values: Any, sizes: Any) -> None:
        nonlocal saved
        seen.extend(weakref.ref(value) for value in values.values())
        if microbatch == 0:
            shards = xla_compat.read_shards(list(values.values()))
            saved = sum(s[0].numel() * s[0].element_size() for s in shards)
        put(kind, microbatch, values, sizes)

    run_step(job, runner, [stage], *batch(job, 0))
    stage.submod.zero_grad()
    stage.saved.put = watching
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


def new_storages(schedule: str) -> tuple[list[int], int, list[bool]]:
    """Return how often each of five steps took new memory for what a program saves.

    Then the most microbatches that waited, and whether gradients stayed as they were
    in the first three steps. The fourth one has fewer rows.
    """
    job = Job(
        schedule=schedule, frontend="manual", num_microbatches=6, rows=12, devices=1
    )
    stages, runner = start(job)
    new_values, made, grads = xla_compat.new_values, 0, []

    def counting(looks: Any) -> Any:
        nonlocal made
        made += 1
        return new_values(looks)

    found = []
    xla_compat.new_values = counting
    try:
        for rows in (12, 12, 12, 6, 12):
            before = made
            x, y = batch(job, 0)
            run_step(job, runner, stages, x[:rows], y[:rows])
            found.append(made - before)
            parameters = [p for stage in stages for p in stage.submod.parameters()]
            grads.append([p.grad.cpu() for p in parameters])
            for parameter in parameters:
                parameter.grad = None
    finally:
        xla_compat.new_values = new_values
    same = [all(map(torch.equal, grads[0], others)) for others in grads[1:3]]
    return found, sum(stage.peak_memory().num_live for stage in stages), same


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZBVZeroBubble"])
def test_steps_save_values_in_the_memory_of_the_first_one(
    worlds: Worlds, schedule: str
) -> None:
    for made, live, same in worlds.run(new_storages, ranks=2, args=(schedule,)):
        first, second, third, other, last = made
        assert (second, third) == (0, 0)
        # What another kind of step does not use is not kept.
        assert other > 0
        assert last == first
        # Under ZBV backwards of inputs pass values on, too.
        assert first == live or (first > live and schedule == "ZBVZeroBubble")
        assert all(same)


def size_of_process(what: str) -> int:
    """Return how large this process is ("VmRSS") or has been ("VmHWM"), in bytes."""
    (line,) = (x for x in open("/proc/self/status") if x.startswith(what))
    return int(line.split()[1]) << 10


def peak_beside_the_process(schedule: str) -> tuple[Any, list[int], int, int]:
    """Return the report, and what the process took for steps beside what stays.

    Then the bytes of parameters, and of the state of AdamW.
    """
    join()
    module = nn.Linear(128, 1 << 15)
    stage = xpp.PipelineStage(module, 0, 1, xpp.device())
    runner = get_schedule_class(schedule)(stage, 4, loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(stage.submod.parameters())
    x, y = torch.randn(4 * 256, 128), torch.zeros(4 * 256, dtype=torch.long)
    most = []
    for _ in range(8):
        xla_compat.wait_device()
        time.sleep(0.5)  # other threads free what the optimizer's program has read
        Path("/proc/self/clear_refs").write_text("5")
        runner.step(x, target=y.to(xpp.device()))
        xla_compat.wait_device()
        most.append(size_of_process("VmHWM"))
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
    values = [*stage.submod.parameters()]
    state = [v for p in values for v in optimizer.state[p].values() if v.is_xla]
    bytes_of = [sum(4 * v.numel() for v in group) for group in (values, state)]
    xla_compat.wait_device()
    time.sleep(0.5)
    cpu.begin_step(has_compiled=True)  # gives back what waits for the next step
    idle = size_of_process("VmRSS")
    # The first steps compile, and those of the optimizer copy.
    taken = [peak - idle for peak in most[3:]]
    return stage.peak_memory(), taken, *bytes_of


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_the_peak_is_what_the_process_takes(worlds: Worlds, schedule: str) -> None:
    ((memory, taken, parameters, state),) = worlds.run(
        peak_beside_the_process, ranks=1, args=(schedule,)
    )
    assert memory.optimizer_bytes == state >= 2 * parameters
    assert memory.state_bytes == 2 * parameters
    # Beside what stays between steps: sums, and what programs need.
    expected = memory.peak_bytes - parameters - state
    assert statistics.median(taken) == pytest.approx(expected, rel=0.1)
    # In some steps XLA takes memory for a program before the one before has given back
    # what it has read, here a weight at most.
    assert max(taken) < 1.1 * expected + parameters
    assert memory.active_bytes > memory.saved_bytes
