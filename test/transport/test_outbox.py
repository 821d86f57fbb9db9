"""Through the host, values leave on a thread while their rank goes on."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from jobs import assert_same, on_device, start
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F
from torchrun import torchrun

import torch_xla_pp as xpp
from torch_xla_pp import xla_compat
from torch_xla_pp.testing import Worlds
from torch_xla_pp.transport import Message, ShardLayout

pytestmark = pytest.mark.worlds

LIMIT_S = 60.0
NAME = Message("F", 1, 0, 0)
WIDTH, MICROBATCHES = 4, 4


def wait(event: threading.Event) -> None:
    assert event.wait(LIMIT_S)


@contextmanager
def reading_held() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Hold back what is read from devices; yield events: it has begun, it may go on."""
    begun, let_go = threading.Event(), threading.Event()
    read = xla_compat.read_ready

    def held(tensor: Tensor) -> list[Tensor]:
        begun.set()
        wait(let_go)
        return read(tensor)

    with mock.patch.object(xla_compat, "read_ready", held):
        try:
            yield begun, let_go
        finally:
            let_go.set()


def values(number: int) -> list[Tensor]:
    host = torch.arange(8.0).reshape(4, 2) + number
    return [on_device(host, ("a", None)), on_device(host)]


def send_and_go_on() -> None:
    group = start(transport="host")
    layouts = [ShardLayout.of_tensor(value) for value in values(0)]
    if group.rank() == 0:
        with reading_held() as (begun, let_go):
            for number in (0, 1):
                group.transport.send(NAME, 1, values(number))
            wait(begun)
            # The devices go on, too.
            assert on_device(torch.ones(2)).add(1).cpu().tolist() == [2.0, 2.0]
            group.rendezvous.exchange("held", None)
            group.rendezvous.exchange("looked", None)
            let_go.set()
            group.transport.recv(Message("B", 0, 0, 1), 1, layouts)
        return
    ticket = group.wire.expect(0, (NAME.title,))
    group.rendezvous.exchange("held", None)
    assert not group.wire.has_arrived(ticket)
    group.rendezvous.exchange("looked", None)
    assert len(group.wire.receive(ticket).parts) == 3
    for got, want in zip(
        group.transport.recv(NAME, 0, layouts), values(1), strict=True
    ):
        assert_same(got, want)
    group.transport.send(Message("B", 0, 0, 1), 0, values(2))


def test_a_rank_goes_on_while_what_it_sends_is_read_and_order_is_kept(
    worlds: Worlds,
) -> None:
    worlds.run(send_and_go_on, ranks=2, devices=2, keep_workers=True)


def make_schedule(kind: Any) -> tuple[xpp.PipelineStage, Any]:
    torch.manual_seed(dist.get_rank())
    module = nn.Linear(WIDTH, WIDTH)
    stage = xpp.PipelineStage(module, dist.get_rank(), 2, xpp.device())
    return stage, kind(stage, MICROBATCHES, loss_fn=F.mse_loss)


def run_step(stage: xpp.PipelineStage, schedule: Any) -> list[float]:
    """Run a step on ones; return the losses, or the gradient of the bias."""
    x, losses = torch.ones(2 * MICROBATCHES, WIDTH), []
    if stage.is_first:
        schedule.step(x)
    else:
        schedule.step(target=x, losses=losses)
    found = [loss.item() for loss in losses] or stage.submod.bias.grad.cpu().tolist()
    stage.submod.zero_grad()
    return found


def after_last_forward(stage: xpp.PipelineStage, call: Callable[[], Any]) -> Any:
    """Let a stage call a function when the last forward of a step is enqueued."""
    forward = stage.forward_one_chunk

    def counted(index: int, *args: Any) -> Any:
        result = forward(index, *args)
        if index == MICROBATCHES - 1:
            call()
        return result

    return mock.patch.object(stage, "forward_one_chunk", counted)


def all_forwards_before_a_message() -> tuple[list[float], list[float]]:
    start(transport="host")
    stage, schedule = make_schedule(ScheduleGPipe)
    plain = run_step(stage, schedule)
    if not stage.is_first:
        return plain, run_step(stage, schedule)
    with reading_held() as (begun, let_go):

        def go_on() -> None:
            wait(begun)
            let_go.set()

        with after_last_forward(stage, go_on):
            return plain, run_step(stage, schedule)


def test_a_step_enqueues_all_forwards_while_the_first_message_is_read(
    worlds: Worlds,
) -> None:
    for plain, held in worlds.run(
        all_forwards_before_a_message, ranks=2, keep_workers=True
    ):
        assert plain == held


def a_value_is_not_readable(who: int) -> tuple[list[float], str, list[float]]:
    """Train; one rank cannot read what it sends in the second step."""
    group = start(transport="host")
    stage, schedule = make_schedule(Schedule1F1B)
    before = run_step(stage, schedule)
    # What the last rank sends is still read when its own step has ended.
    group.rendezvous.exchange("the first step has ended", None)
    fault = RuntimeError("lost a device") if dist.get_rank() == who else None
    real = xla_compat.read_ready
    start_s = time.monotonic()
    with (
        mock.patch.object(xla_compat, "read_ready", side_effect=fault, wraps=real),
        pytest.raises(xpp.TransportError) as caught,
    ):
        run_step(stage, schedule)
    assert time.monotonic() - start_s < LIMIT_S / 2
    return before, str(caught.value), run_step(stage, schedule)


@pytest.mark.parametrize("who", [0, 1])
def test_what_cannot_be_read_is_one_error_of_all_ranks_and_the_next_step_is_right(
    worlds: Worlds, who: int
) -> None:
    """The rank itself waits for an answer to what it could not send."""
    found = worlds.run(a_value_is_not_readable, ranks=2, args=(who,), keep_workers=True)
    what = ("1F0 (stage 1, microbatch 0, from", "0B0 (stage 0, microbatch 0, from")[who]
    for before, text, after in found:
        assert text.startswith(f"send {what}")
        assert "expected its values from the devices, got RuntimeError: lost" in text
        assert f"(raised on rank {who}): stage {who}, step 2, {who}" in text
        assert before == after


def a_step_is_left_while_values_are_read() -> tuple[list[float], list[float]]:
    """Leave a step whose messages are still to be sent; they must not come later."""
    group = start(transport="host")
    stage, schedule = make_schedule(ScheduleGPipe)
    before = run_step(stage, schedule)

    def meet() -> None:
        group.rendezvous.exchange("forwards are enqueued", None)

    if stage.is_first:
        with reading_held() as (begun, let_go), after_last_forward(stage, meet):
            x = torch.full((2 * MICROBATCHES, WIDTH), 7.0)
            with pytest.raises(ValueError, match=r"bad target \(raised on rank 1\)"):
                schedule.step(x)
            wait(begun)
            # Of the step's messages the first is being read, the others wait for it.
            let_go.set()
    else:
        meet()
        with (
            pytest.raises(ValueError, match="bad target"),
            group.rendezvous.reporting(),
        ):
            raise ValueError("bad target")
    return before, run_step(stage, schedule)


def test_messages_of_a_step_that_was_left_are_dropped(worlds: Worlds) -> None:
    for before, after in worlds.run(
        a_step_is_left_while_values_are_read, ranks=2, keep_workers=True
    ):
        assert before == after


def a_peer_dies_amid_messages() -> None:
    group = start(transport="host")
    big = [on_device(torch.zeros(1 << 22))]
    layouts = [ShardLayout.of_tensor(value) for value in big]
    if group.rank() == 1:
        group.transport.recv(NAME, 0, layouts)
        os.kill(os.getpid(), signal.SIGKILL)
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        group.transport.send(NAME, 1, big)
        time.sleep(0.01)
    raise AssertionError("no error")


def test_a_peer_that_dies_amid_messages_ends_sends_in_one_clear_error(
    worlds: Worlds,
) -> None:
    outcomes = worlds.run_outcomes(a_peer_dies_amid_messages, ranks=2)
    assert outcomes[1].error == "Died"
    assert outcomes[0].error == "TransportError"
    assert "rank 1 is gone: " in outcomes[0].message


SCRIPT = """
import os, torch, torch.distributed as dist
os.environ["TORCH_XLA_PP_TRANSPORT"] = "host"
import torch_xla_pp as xpp
from torch_xla_pp.transport import Message, ShardLayout, of_group
device = xpp.device()
dist.init_process_group("xla_pp")
rank, transport = dist.get_rank(), of_group(None).transport
value = torch.eye(1024, device=device)
layouts = [ShardLayout.of_tensor(value)]
if rank:
    for _ in range(20):
        value = value @ value
    for number in range(4):
        transport.send(Message("F", 0, number, rank), 0, [value + number])
    if rank == 1:
        dist.destroy_process_group()
else:
    for peer in (1, 2):
        for number in range(4):
            (got,) = transport.recv(Message("F", 0, number, peer), peer, layouts)
            assert got.trace().item() == 1024 * (1 + number), number
    print("received all")
"""


def test_what_was_put_before_a_rank_leaves_or_ends_arrives(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    output = torchrun(script, ranks=3, devices=1)
    assert "received all" in output
    assert "terminate called" not in output
