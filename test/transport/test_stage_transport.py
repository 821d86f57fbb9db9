"""Stages' messages arrive whole, in any order, and failures are reported."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_xla.distributed.spmd as xs
from jobs import Spec, assert_same, gathers, mesh, on_device, start
from torch import Tensor
from torchrun import torchrun

from torch_xla_pp import xla_compat
from torch_xla_pp.testing import Worlds
from torch_xla_pp.transport import Message, ShardLayout

pytestmark = pytest.mark.worlds

SPLIT: Spec = ("a", None)


TRANSPORTS = pytest.mark.parametrize("transport", ["in_graph", "host"])


def values(number: int) -> list[Tensor]:
    """Make the values of one message: split, replicated, empty, of two dtypes."""
    host = torch.arange(8.0).reshape(4, 2) + number
    return [
        on_device(host, SPLIT),
        on_device(host.to(torch.int32)),
        on_device(torch.zeros(0, 2)),
        on_device(host.bfloat16(), (None, "a")),
    ]


def test_a_message_prints_as_torch_prints_actions() -> None:
    assert str(Message("F", 2, 0, 0)) == "2F0"
    assert Message("B", 2, 3, 0).title == "2B3 (stage 2, microbatch 3, from stage 0)"


def many_messages(transport: str) -> None:
    group = start(transport=transport)
    peer = 1 - group.rank()
    layouts = [ShardLayout.of_tensor(value) for value in values(0)]
    names = [
        Message(direction, stage, mb, 0)
        for mb in range(16)
        for stage in (0, 700)
        for direction in ("F", "B")
    ]
    before = gathers()
    for number, name in enumerate(names):
        group.transport.send(name, peer, values(number))
    received = {
        number: group.transport.recv(name, peer, layouts)
        for number, name in reversed(list(enumerate(names)))
    }
    group.transport.settle()
    for number, found in received.items():
        for got, want in zip(found, values(number), strict=True):
            assert_same(got, want)
    # The same name again, as in the next step; and more values than a text can list.
    for number in (0, 1):
        group.transport.send(names[0], peer, values(number) * 50)
    for number in (0, 1):
        found = group.transport.recv(names[0], peer, layouts * 50)
        group.transport.settle()
        assert_same(found[-1], values(number)[-1])
    assert gathers() == before


@TRANSPORTS
def test_many_messages_arrive_in_any_order(worlds: Worlds, transport: str) -> None:
    worlds.run(many_messages, ranks=2, devices=2, args=(transport,), keep_workers=True)


def messages_to_oneself(transport: str) -> None:
    group = start(transport=transport)
    me, name = group.rank(), Message("F", 1, 0, 0)
    layouts = [ShardLayout.of_tensor(value) for value in values(0)]
    group.transport.send(name, me, values(3))
    found = group.transport.recv(name, me, layouts)
    group.transport.settle()
    for got, want in zip(found, values(3), strict=True):
        assert_same(got, want)
    with pytest.raises(RuntimeError, match="expected it to be sent before"):
        group.transport.recv(name, me, layouts)
    with pytest.raises(ValueError, match=r"1F0 .*: expected at least one value"):
        group.transport.send(name, me, [])


@TRANSPORTS
def test_a_rank_may_send_to_itself_but_not_wait_for_what_comes_later(
    worlds: Worlds, transport: str
) -> None:
    worlds.run(
        messages_to_oneself, ranks=1, devices=2, args=(transport,), keep_workers=True
    )


def around_a_ring(transport: str) -> None:
    group = start(transport=transport)
    size, me = group.size(), group.rank()
    layouts = [ShardLayout.of_tensor(value) for value in values(0)]
    for number in range(8):
        for distance in (1, 2, 3):
            name = Message("F", distance, number, 0)
            group.transport.send(name, (me + distance) % size, values(me + number))
    for number in range(8):
        for distance in (3, 1, 2):
            peer = (me - distance) % size
            name = Message("F", distance, number, 0)
            found = group.transport.recv(name, peer, layouts)
            group.transport.settle()
            assert_same(found[0], values(peer + number)[0])


@TRANSPORTS
def test_four_ranks_send_to_each_other_at_once(worlds: Worlds, transport: str) -> None:
    worlds.run(around_a_ring, ranks=4, devices=1, args=(transport,), keep_workers=True)


def wrong_layout(transport: str) -> str:
    group = start(transport=transport)
    name = Message("F", 1, 1, 0)
    if group.rank() == 0:
        group.transport.send(name, 1, values(0)[:1])
    try:
        with group.rendezvous.reporting():
            if group.rank() == 1:
                layouts = [ShardLayout.of_tensor(value) for value in values(0)]
                group.transport.recv(name, 0, layouts)
                group.transport.settle()
            group.rendezvous.exchange("end", None)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@TRANSPORTS
def test_a_message_of_another_layout_is_refused(worlds: Worlds, transport: str) -> None:
    texts = worlds.run(
        wrong_layout, ranks=2, devices=2, args=(transport,), keep_workers=True
    )
    for text in texts:
        assert text.startswith(
            "TransportError: recv 1F1 (stage 1, microbatch 1, from stage 0) from"
        )
        assert "Use the same model, split and schedule on both ranks." in text
    if transport == "in_graph":
        assert "expected shards float32[4] int32[8]" in texts[1]
        assert "got shards float32[4] on 2 devices" in texts[1]


def one_rank_fails(transport: str) -> list[str]:
    group = start(transport=transport)
    rank, found = group.rank(), []
    layouts = [ShardLayout.of_tensor(values(0)[0])]
    message = Message("F", 1, 0, 0)
    for step in range(2):
        start_s = time.monotonic()
        try:
            with group.rendezvous.reporting("2F0"):
                if rank == 0:
                    group.transport.recv(Message("F", 1, 2, 0), 1, layouts)
                    group.transport.settle()
                # A leftover which the next step must not receive.
                group.transport.send(message, 0, values(13)[:1])
                time.sleep(0.3)
                group.transport.send(Message("F", 1, 1, 0), 0, values(13)[:1])
                raise ValueError(f"bad data in step {step}")
        except ValueError as error:
            found.append(str(error))
        except RuntimeError:
            found.append("wrong type")
        assert time.monotonic() - start_s < 5
    group.rendezvous.exchange("settled", None)
    # Both ranks go on; collectives and messages of failed steps are void.
    total = on_device(torch.ones(2))
    dist.all_reduce(total)
    assert_same(total, on_device(torch.full((2,), 2.0)))
    if rank == 1:
        group.transport.send(message, 0, values(5)[:1])
    else:
        (received,) = group.transport.recv(message, 1, layouts)
        group.transport.settle()
        assert_same(received, values(5)[0])
    return found


def all_reduce_with_a_failing_peer() -> str:
    group = start()
    try:
        with group.rendezvous.reporting():
            if group.rank() == 1:
                raise TypeError("no loss")
            dist.all_reduce(on_device(torch.ones(2)))
    except TypeError as error:
        return str(error)
    return "nothing"


def two_seconds(transport: str) -> str:
    group = start(timeout_s=2, transport=transport)
    layouts = [ShardLayout.of_tensor(value) for value in values(0)]
    start_s = time.monotonic()
    try:
        if group.rank() == 0:
            group.transport.recv(Message("B", 3, 7, 0), 1, layouts)
            group.transport.settle()
        else:
            time.sleep(3)
    except RuntimeError as error:
        assert 1.9 < time.monotonic() - start_s < 4
        return f"{type(error).__name__}: {error}"
    return ""


def leave_after_the_last_send(transport: str) -> None:
    group = start(transport=transport)
    message = Message("F", 1, 0, 0)
    group.transport.expect(Message("F", 1, 0, 0), 1 - group.rank())
    if group.rank() == 0:
        for number in range(8):
            group.transport.send(message, 1, values(number))
        dist.send(on_device(torch.ones(1 << 20)), 1)
        dist.destroy_process_group()
        return
    layouts = [ShardLayout.of_tensor(value) for value in values(0)]
    time.sleep(1.5)
    for number in range(8):
        received = group.transport.recv(message, 0, layouts)
        group.transport.settle()
        assert_same(received[0], values(number)[0])
    big = torch.zeros(1 << 20, device="xla")
    dist.recv(big, 0)
    assert_same(big, on_device(torch.ones(1 << 20)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"rank 0 is gone: it has left"):
            group.transport.recv(message, 0, layouts)
            group.transport.settle()
    with pytest.raises(RuntimeError, match=r"send .*: rank 0 is gone: it has left"):
        group.transport.send(message, 0, values(0))
        xla_compat.wait_device()
        group.transport.settle()


@TRANSPORTS
def test_a_peers_error_ends_every_wait_and_the_next_step_works(
    worlds: Worlds, transport: str
) -> None:
    zero, one = worlds.run(one_rank_fails, ranks=2, devices=2, args=(transport,))
    assert one == ["bad data in step 0", "bad data in step 1"]
    assert zero == [f"{text} (raised on rank 1): 2F0" for text in one]


def test_a_peers_error_ends_a_collective(worlds: Worlds) -> None:
    texts = worlds.run(all_reduce_with_a_failing_peer, ranks=2, devices=2)
    assert texts == ["no loss (raised on rank 1)", "no loss"]


@TRANSPORTS
def test_a_timeout_names_message_peer_and_seconds(
    worlds: Worlds, transport: str
) -> None:
    text, _ = worlds.run(two_seconds, ranks=2, devices=2, args=(transport,))
    assert re.match(
        r"TransportTimeout: rank 0 waited 2\S* s for rank 1: recv 3B7 \(stage 3, "
        r"microbatch 7, from stage 0\)",
        text,
    )


@TRANSPORTS
def test_what_was_sent_before_leaving_the_group_arrives(
    worlds: Worlds, transport: str
) -> None:
    worlds.run(leave_after_the_last_send, ranks=2, devices=2, args=(transport,))


def leave_while_a_device_computes(transport: str) -> None:
    group = start(transport=transport)
    message, count = Message("F", 1, 0, 0), 1 << 21
    # It takes the second device longer to sort its row.
    torch.manual_seed(0)
    rows = torch.stack([torch.arange(float(count)), torch.rand(count)])
    if group.rank() == 0:
        value = on_device(rows, SPLIT).sort(dim=1).values[:, :4].clone()
        xs.mark_sharding(value, mesh(), SPLIT)
        group.transport.send(message, 1, [value])
        dist.destroy_process_group()
        return
    expected = on_device(rows.sort(dim=1).values[:, :4], SPLIT)
    layouts = [ShardLayout.of_tensor(expected)]
    (received,) = group.transport.recv(message, 0, layouts)
    group.transport.settle()
    assert_same(received, expected)


@TRANSPORTS
def test_what_devices_still_compute_when_their_rank_leaves_arrives(
    worlds: Worlds, transport: str
) -> None:
    worlds.run(leave_while_a_device_computes, ranks=2, devices=2, args=(transport,))


def fail_and_leave_at_once() -> str:
    group = start()
    if group.rank() == 0:
        group.rendezvous.report(ValueError("bad batch"))
        dist.destroy_process_group()
        return ""
    time.sleep(1.5)
    with pytest.raises(ValueError) as caught:
        group.rendezvous.exchange("x", 1)
    return str(caught.value)


def test_the_error_of_a_rank_that_left_is_not_lost(worlds: Worlds) -> None:
    _, text = worlds.run(fail_and_leave_at_once, ranks=2, devices=1)
    assert text == "bad batch (raised on rank 0)"


def one_rank_is_killed(transport: str, victim: int) -> None:
    group = start(transport=transport)
    if group.rank() == victim:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    layouts = [ShardLayout.of_tensor(value) for value in values(0)]
    group.transport.recv(Message("F", 1, 0, 0), victim, layouts)
    group.transport.settle()


@TRANSPORTS
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_peer_is_named_at_once(
    worlds: Worlds, transport: str, victim: int
) -> None:
    start_s = time.monotonic()
    outcomes = worlds.run_outcomes(
        one_rank_is_killed, ranks=2, devices=2, args=(transport, victim)
    )
    assert time.monotonic() - start_s < 60
    assert outcomes[victim].error == "Died"
    left = outcomes[1 - victim]
    assert left.error == "TransportError"
    assert f"rank {victim} is gone: " in left.message


SCRIPT = """
import time, torch, torch.distributed as dist
import torch_xla_pp as xpp
device = xpp.device()
dist.init_process_group("xla_pp")
if dist.get_rank() == 1:
    dist.isend(torch.full((1 << 20,), 7.0, device=device), 0)
else:
    time.sleep(2)
    into = torch.zeros(1 << 20, device=device)
    dist.recv(into, 1)
    print("received", into.sum().item() / (1 << 20))
"""


def test_what_was_sent_before_the_process_ended_arrives(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert "received 7.0" in torchrun(script, ranks=2, devices=2)
