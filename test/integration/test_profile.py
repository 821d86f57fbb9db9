"""The timeline of a real step: complete, in order, and without an influence."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_xla.debug.metrics as metrics
from integration.training import COUNTERS, Job, batch, run_step, start
from joining import join
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

import torch_xla_pp as xpp
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.native import notes
from torch_xla_pp.profile import clock
from torch_xla_pp.profile.clock import clock_offset_ns
from torch_xla_pp.schedule import Schedule
from torch_xla_pp.testing import Worlds, pause
from torch_xla_pp.timeline import Span, Timeline
from torch_xla_pp.torch_compat import order_of
from torch_xla_pp.transport import of_group

pytestmark = pytest.mark.worlds

DELAY_S = 0.05
PAUSES = 3
# Of the clocks of two processes on one host, and of a note and what it is about.
TOLERANCE_S = 0.002
BYTES = 2 * 3 * 8 * 4  # of a microbatch between two stages


def numbers(stages: list[Any], output: Any, losses: list[Any]) -> list[torch.Tensor]:
    """Return what a step has computed, and forget its gradients."""
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    values = [p.grad for p in parameters] + losses
    values += [] if output is None else [output]
    for parameter in parameters:
        parameter.grad = None
    return [value.detach().cpu() for value in values]


def profiled(job: Job) -> tuple[Timeline, Timeline, str, list[str]]:
    """Return two timelines, the second with a slow network, the order, and faults."""
    stages, schedule = start(job)
    x, y = batch(job, 0)
    faults = []
    plain = numbers(stages, *run_step(job, schedule, stages, x, y))
    for step in range(2):
        before = [metrics.counter_value(name) or 0 for name in COUNTERS]
        with xpp.profile_step(schedule) as profile:
            result = run_step(job, schedule, stages, x, y)
        if step and before != [metrics.counter_value(name) or 0 for name in COUNTERS]:
            faults.append("compiled in the second profiled step")
        for got, expected in zip(numbers(stages, *result), plain, strict=True):
            if not torch.equal(got, expected):
                faults.append("other numbers than without a profile")
    engine = getattr(stages[0].process_group.transport, "engine", None)
    if engine is not None:
        engine.delay(DELAY_S)
    with xpp.profile_step(schedule) as slow:
        run_step(job, schedule, stages, x, y)
    if engine is not None:
        engine.delay(0)
    run_step(job, schedule, stages, x, y)
    # What is held back, be it for no time, may be overtaken by a peer that leaves.
    dist.barrier()
    if notes.stop():
        faults.append("noted while nobody listens")
    table = order_of(schedule).to_csv()  # type: ignore[union-attr]
    return profile.timeline, slow.timeline, table, faults


def check_order(timeline: Timeline, order: Schedule) -> None:
    for rank, row in enumerate(order.actions):
        expected = [str(action) for action in row if action is not None]
        assert [str(span) for span in timeline.of_rank(rank)] == expected
    assert all(span.dispatch_s for span in timeline.spans)


def check_transfers(timeline: Timeline, job: Job) -> None:
    """Compare messages with the edges between ranks, and with what they are part of."""
    rank_of = {s: r for r in range(job.ranks) for s in job.stages_of(r)}
    pairs = [(s, s + 1) for s in range(job.num_stages - 1)]
    pairs = [(a, b) for a, b in pairs if rank_of[a] != rank_of[b]]
    expected = {
        f"{a}->{b} {kind}{i}"
        for first, second in pairs
        for kind, a, b in (("F", first, second), ("B", second, first))
        for i in range(job.num_microbatches)
    }
    assert {str(transfer) for transfer in timeline.transfers} == expected
    assert len(timeline.transfers) == len(expected)
    for transfer in timeline.transfers:
        assert transfer.num_bytes == BYTES
        index = transfer.microbatch
        kinds = "F" if transfer.kind == "F" else "BIW"
        sender = spans(timeline, transfer.sender_stage, kinds, index)
        receiver = spans(timeline, transfer.receiver_stage, kinds, index)
        sent_s, received_s = transfer.sent_s, transfer.received_s
        assert sender[0].rank == transfer.sender_rank
        assert receiver[0].rank == transfer.receiver_rank
        assert sender[0].start_s <= sent_s <= sender[-1].end_s + TOLERANCE_S
        assert sent_s <= received_s + TOLERANCE_S
        assert received_s <= receiver[-1].end_s + TOLERANCE_S


def spans(timeline: Timeline, stage: int, kinds: str, index: int) -> list[Span]:
    return [
        span
        for span in timeline.spans
        if (span.stage, span.microbatch) == (stage, index) and span.kind in kinds
    ]


@pytest.mark.parametrize(
    ("schedule", "devices", "transport"),
    [("1F1B", 1, ""), ("ZBVZeroBubble", 2, ""), ("1F1B", 1, "host")],
)
def test_every_action_is_recorded_once_in_order(
    worlds: Worlds, schedule: str, devices: int, transport: str
) -> None:
    job = Job(
        schedule=schedule, devices=devices, transport=transport, frontend="manual"
    )
    runs = worlds.run(profiled, ranks=2, devices=devices, args=(job,))
    (timeline, slow, table, faults), (other, _, _, other_faults) = runs
    assert faults + other_faults == []
    assert timeline == other
    assert all(size > 0 for size in timeline.peak_bytes)
    for each in (timeline, slow):
        check_order(each, Schedule.from_csv(table))
        check_transfers(each, job)
    if transport != "host":
        check_waiting(slow)


def check_waiting(timeline: Timeline) -> None:
    """Messages are late, and ranks wait for them: nobody waits for one that is there.

    How long depends on when the receiver comes to it.
    """
    for transfer in timeline.transfers:
        assert transfer.received_s - transfer.sent_s >= DELAY_S - TOLERANCE_S
    assert sum(span.waiting_s for span in timeline.spans) > DELAY_S
    for transfer in timeline.transfers:
        if transfer.kind == "F":
            (span,) = spans(timeline, transfer.receiver_stage, "F", transfer.microbatch)
            late_s = max(0.0, transfer.received_s - span.start_s)
            assert span.waiting_s <= late_s + TOLERANCE_S


class Pauses(nn.Module):
    """Layers whose parameters are small, each of which takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(PAUSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = pause(layer(x), DELAY_S, DELAY_S)
        return x


def paused() -> list[Span]:
    join()
    stage = xpp.PipelineStage(Pauses(), 0, 1, xpp.device())
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    values = torch.ones(2, 4)
    for _ in range(2):
        with xpp.profile_step(schedule) as profile:
            schedule.step(values, target=values)
    return [*profile.timeline.of_rank(0)]


def test_an_action_ends_when_its_last_gradient_is_there(worlds: Worlds) -> None:
    (found,) = worlds.run(paused, ranks=1, devices=1)
    assert [str(span) for span in found] == ["0F0", "0F1", "0B0", "0B1"]
    for span in found:
        assert span.busy_s >= PAUSES * DELAY_S - TOLERANCE_S


def misused(job: Job, folder: Path) -> list[str]:
    """Return what was raised, and what was recorded after all that."""
    stages, schedule = start(job)
    x, y = batch(job, 0)
    raised = []
    try:
        with xpp.profile_step(schedule):
            pass
    except PipelineError as error:
        raised.append(str(error))
    try:
        with xpp.profile_step(schedule):
            run_step(job, schedule, stages, x, y)
            run_step(job, schedule, stages, x, y)
    except PipelineError as error:
        raised.append(str(error))
    try:
        with xpp.profile_step(schedule) as profile:
            raised += [str(span) for span in profile.timeline.spans]
    except PipelineError as error:
        raised.append(str(error))
    with xpp.profile_step(schedule) as profile:
        args = (x,) if stages[0].is_first else ()
        schedule.eval(*args, **({} if stages[0].is_first else {"target": y}))
    if stages[0].is_first:
        profile.save(folder / "trace.json")
        profile.save(folder / "picture.svg")
    return [*raised, profile.summary()]


def test_a_block_records_exactly_one_step_also_of_eval(
    worlds: Worlds, tmp_path: Path
) -> None:
    job = Job(frontend="manual", num_microbatches=2, rows=4)
    for raised in worlds.run(misused, ranks=2, args=(job, tmp_path)):
        none, two, early, summary = raised
        assert "expected one step in the block, got none" in none
        assert (
            "expected one step in the block, got 0F0 for the second" in two
            or "got 1F0 for the second" in two
        )
        assert "expected the block to have ended" in early
        assert "0 -> 1 F" in summary
        assert "1 -> 0" not in summary
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    shown = {event["name"] for event in events if event.get("cat") == "F"}
    assert shown == {"0F0", "0F1", "1F0", "1F1"}
    assert (tmp_path / "picture.svg").read_text().startswith("<?xml")


def test_a_schedule_is_needed() -> None:
    with pytest.raises(TypeError, match=r"expected a schedule of .*, got int"):
        with xpp.profile_step(3):
            pass


class _ClockAhead:
    """A clock that is ahead by three hours."""

    ahead_ns = 3 * 3600 * 10**9

    @classmethod
    def monotonic_ns(cls) -> int:
        return time.monotonic_ns() + cls.ahead_ns


def offsets() -> list[int]:
    """Return the offset as it is, and with another clock on rank 1."""
    join("")
    group = of_group(None)
    found = [clock_offset_ns(group) for _ in range(10)][:1]
    if group.rank() == 1:
        clock.time = _ClockAhead
    found.append(clock_offset_ns(group))
    clock.time = time
    return found


def test_clocks_of_one_host_agree_and_others_are_measured(worlds: Worlds) -> None:
    (first, second), (third, fourth) = worlds.run(offsets, ranks=2)
    assert (first, second, third) == (0, 0, 0)
    assert abs(fourth + _ClockAhead.ahead_ns) < 50_000_000
