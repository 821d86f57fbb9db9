"""Sends and receives as ops of the programs: what is compiled, what may go wrong."""

import os
import re
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_xla.debug.metrics as met
from hypothesis import given
from jobs import Spec, assert_same, boundary_values, on_device, same_draws, start
from logged import logged
from torch import Tensor
from torchrun import torchrun

from torch_xla_pp import xla_compat
from torch_xla_pp.local_job import free_port
from torch_xla_pp.mesh import Tiling
from torch_xla_pp.native import Engine
from torch_xla_pp.testing import Outcome, Worlds
from torch_xla_pp.transport import (
    InGraphTransport,
    Message,
    ShardLayout,
    XlaPpProcessGroup,
    receive_op,
    send_op,
)

pytestmark = pytest.mark.worlds

ROWS: Spec = ("a", None)
NAME = Message("F", 1, 0, 0)


def join(**options: Any) -> tuple[XlaPpProcessGroup, InGraphTransport, int]:
    """Return the group, its transport and the rank of the other one of two ranks."""
    group = start(transport="in_graph", **options)
    assert isinstance(group.transport, InGraphTransport)
    return group, group.transport, 1 - group.rank()


def values(number: float = 0) -> list[Tensor]:
    host = torch.arange(8.0).reshape(4, 2) + number
    return [on_device(host, ROWS), on_device(host)]


def layouts() -> list[ShardLayout]:
    return [ShardLayout.of_tensor(value) for value in values()]


def boundary_program(dump: str) -> None:
    """Run a program that receives, computes and sends; XLA writes what it compiled."""
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
    group, transport, peer = join()
    transport.send(NAME, peer, values(group.rank()))
    received, kept = receive_op(
        transport.receive_route(NAME, peer, layouts()), layouts()
    )
    doubled = [value + value for value in received]
    token = send_op(transport.send_route(NAME, peer, layouts()), doubled, layouts())
    xla_compat.materialize([token + kept])
    # It comes back doubled.
    found = transport.recv(NAME, peer, layouts())
    transport.settle()
    host = 2 * (torch.arange(8.0).reshape(4, 2) + group.rank())
    for got, want in zip(found, [on_device(host, ROWS), on_device(host)], strict=True):
        assert_same(got, want)
    dist.barrier()


def test_a_boundary_is_two_custom_calls_and_nothing_else(tmp_path: Path) -> None:
    # XLA reads its flags once, so these workers must be new.
    with Worlds() as worlds:
        worlds.run(boundary_program, ranks=2, devices=4, args=(str(tmp_path),))
    texts = [path.read_text() for path in tmp_path.glob("*after_optimizations.txt")]
    both = [text for text in texts if "pp.recv(" in text and "pp.send(" in text]
    assert both
    for text in both:
        targets = re.findall(r'custom_call_target="torch_xla_pp.(\w+)\(', text)
        assert sorted(targets) == ["recv", "send"]
        ops = set(re.findall(r"^\s+(?:ROOT )?\S+ = .*? ([a-z-]+)\(", text, re.M))
        assert {"custom-call", "parameter"} <= ops
        known = {"custom-call", "parameter", "tuple", "get-tuple-element", "fusion"}
        known |= {"add", "bitcast", "call", "constant", "copy"}
        assert ops <= known


def page_faults_of_a_large_message(size: int) -> int:
    """Exchange messages of as many bytes; return what the second one cost."""
    _, transport, peer = join()
    sent = [on_device(torch.ones(size // 4))]
    layouts = [ShardLayout.of_tensor(value) for value in sent]
    for _ in range(2):
        dist.barrier()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        transport.send(NAME, peer, sent)
        (found,) = transport.recv(NAME, peer, layouts)
        transport.settle()
        page_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert_same(found, sent[0])
    return page_faults


@pytest.mark.usefixtures("large_pages")
def test_a_large_message_costs_few_page_faults(worlds: Worlds) -> None:
    size = 1 << 25
    for found in worlds.run(
        page_faults_of_a_large_message, ranks=2, devices=1, args=(size,)
    ):
        # The parts of large pages at both ends are small pages.
        assert found < size // resource.getpagesize() // 4


def nothing_but_empty_values() -> None:
    _, transport, peer = join()
    empty = [on_device(torch.zeros(0, 3))]
    laid_out = [ShardLayout.of_tensor(value) for value in empty]
    transport.send(NAME, peer, empty)
    (found,) = transport.recv(NAME, peer, laid_out)
    transport.settle()
    assert found.shape == (0, 3)
    # Neither is a receive dropped whose values are of no use.
    transport.send(NAME, peer, values())
    _, token = receive_op(transport.receive_route(NAME, peer, layouts()), layouts())
    xla_compat.materialize([token])
    transport.settle()
    assert transport.engine.stats() == (0, 0, 0)


def test_every_message_is_received_also_if_nobody_needs_it(worlds: Worlds) -> None:
    worlds.run(nothing_but_empty_values, ranks=2, devices=2, keep_workers=True)


def made_of_nothing() -> xla_compat.GraphHash:
    """Compile a program without parameters."""
    return xla_compat.compile_graph([torch.ones(3, device="xla") + 1]).hash


def tell_and_run() -> None:
    """Run a program behind one whose message comes once the sender is notified."""
    group, transport, peer = join()
    graph = made_of_nothing()
    laid_out = [ShardLayout.of_tensor(on_device(torch.zeros(3)))]
    for number in range(20):
        name = f"turn {number}"
        if group.rank() == 0:
            transport.recv(NAME, peer, laid_out)
            group.rendezvous.announce(name, None)
            xla_compat.run_graph(graph, [])
        else:
            group.rendezvous.take(name, peer, 20)
            transport.send(NAME, peer, [on_device(torch.ones(3))])
    transport.settle()
    dist.barrier()


def test_a_rank_is_notified_while_it_waits_for_a_program(worlds: Worlds) -> None:
    """Programs of one device run on the thread that launches the next one."""
    worlds.run(tell_and_run, ranks=2, devices=1, timeout_s=60)


def wrong_value() -> None:
    group, transport, peer = join()
    route = transport.send_route(NAME, peer, layouts())
    with pytest.raises(ValueError, match=r"send: expected float32\[4, 2\] .*, got"):
        send_op(route, [value.bool() for value in values()], layouts())


def test_a_value_must_be_what_was_agreed_on(worlds: Worlds) -> None:
    worlds.run(wrong_value, ranks=2, devices=2, keep_workers=True)


def random_values() -> int:
    """Send what Hypothesis draws, alike on both ranks, through one program each way."""
    group, transport, peer = join()
    count = 0

    @same_draws(25)
    @given(boundary_values())
    def exchange(drawn: list[tuple[Tensor, Spec]]) -> None:
        nonlocal count
        count += 1
        sent = [on_device(value, spec) for value, spec in drawn]
        laid_out = [ShardLayout.of_tensor(value) for value in sent]
        route = transport.send_route(NAME, peer, laid_out)
        xla_compat.materialize([send_op(route, sent, laid_out)])
        route = transport.receive_route(NAME, peer, laid_out)
        received, token = receive_op(route, laid_out)
        # Uneven values become whole when they leave a program: compare inside it.
        checks = [
            (got == want).all()
            for got, want in zip(received, sent, strict=True)
            if got.numel()
        ]
        xla_compat.materialize([*checks, token])
        transport.settle()
        assert all(check.item() for check in checks), drawn
        assert [value.dtype for value in received] == [v.dtype for v, _ in drawn]

    exchange()
    return count


def test_any_boundary_value_arrives_whole(worlds: Worlds) -> None:
    for devices in (1, 4):
        counts = worlds.run(
            random_values, ranks=2, devices=devices, timeout_s=200, keep_workers=True
        )
        assert counts[0] == counts[1] >= 20


def counters() -> dict[str, int]:
    names = ("UncachedCompile", "CreateCompileHandles", "ReplicateShardedData")
    return {name: met.counter_value(name) or 0 for name in names}


def many_steps() -> None:
    group, transport, peer = join()
    transport.engine.delay(0.01)
    before: dict[str, int] = {}
    for step in range(3):
        received = []
        for mb in range(40):
            transport.send(Message("F", 1, mb, 0), peer, values(mb + step))
        for mb in range(40):
            received.append(transport.recv(Message("F", 1, mb, 0), peer, layouts()))
        transport.settle()
        for mb in (0, 17, 39):
            for got, want in zip(received[mb], values(mb + step), strict=True):
                assert_same(got, want)
        if step == 0:
            before = counters()
    assert counters() == before
    assert transport.engine.stats() == (0, 0, 0)


def test_nothing_is_compiled_for_other_messages_and_nothing_is_kept(
    worlds: Worlds,
) -> None:
    worlds.run(many_steps, ranks=2, devices=2, keep_workers=True)


def replicas_sent() -> tuple[int, int]:
    """Count the messages of a value that is split over one of two mesh axes."""
    group, transport, peer = join()
    value = on_device(torch.arange(8.0).reshape(4, 2), ROWS)
    whole = on_device(torch.arange(8.0))
    counts = []
    for sent in ([value, whole], [whole]):
        transport.send(NAME, peer, sent)
        xla_compat.wait_device()
        group.rendezvous.exchange("sent", None)
        time.sleep(0.3)
        stats = transport.engine.stats()
        counts.append((stats.num_messages, stats.held_bytes))
        transport.recv(NAME, peer, [ShardLayout.of_tensor(v) for v in sent])
        transport.settle()
        group.rendezvous.exchange("taken", None)
    return tuple(counts)  # type: ignore[return-value]


def test_replicas_are_sent_once(worlds: Worlds) -> None:
    for counts in worlds.run(replicas_sent, ranks=2, devices=4, keep_workers=True):
        # Two devices with a half of 32 bytes each, one of them also with 32 whole ones.
        assert counts == ((2, 64), (1, 32))


def one_device_is_late() -> float:
    """Receive, then combine over both devices, as a stage with a reduction would."""
    group, transport, peer = join(timeout_s=120)
    start_s = time.monotonic()
    if group.rank() == 1:
        transport.engine.delay(60.0, device=1)
        route = transport.receive_route(NAME, peer, layouts())
        (received, _), token = receive_op(route, layouts())
        total = received.sum()
        xla_compat.materialize([total, token])
        transport.settle()
        assert total.item() == 28.0
    else:
        transport.send(NAME, peer, values())
    dist.barrier()
    return time.monotonic() - start_s


def test_a_minute_between_the_messages_of_two_devices_does_no_harm(
    worlds: Worlds,
) -> None:
    assert all(t > 59 for t in worlds.run(one_device_is_late, ranks=2, devices=2))


def killed_between_two_shards() -> None:
    group, transport, peer = join()
    transport.expect(Message("F", 1, 0, 0), peer)
    transport.engine.delay(30.0, device=1)
    group.rendezvous.exchange("delayed", None)
    if group.rank() == 0:
        transport.send(NAME, peer, values())
        xla_compat.wait_device()
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    route = transport.receive_route(NAME, peer, layouts())
    (first, _), token = receive_op(route, layouts())
    total = first.sum()
    xla_compat.materialize([first, total, token])
    start_s = time.monotonic()
    try:
        transport.settle()
    finally:
        assert time.monotonic() - start_s < 10
        # Reading does not crash, and what did not come does not look like a value.
        assert all(s.isnan().all() for s in xla_compat.read_shards([first])[0])
        assert total.isnan().item()
        assert transport.engine.stats() == (0, 0, 0)


def survivor(outcomes: list[Outcome], rank: int) -> str:
    return f"{outcomes[rank].error}: {outcomes[rank].message}"


def test_a_peer_killed_between_two_shards(worlds: Worlds) -> None:
    outcomes = worlds.run_outcomes(killed_between_two_shards, ranks=2, devices=2)
    assert outcomes[0].error == "Died"
    assert "TransportError: " in survivor(outcomes, 1)
    assert "rank 0 is gone: " in survivor(outcomes, 1)


def last_of_four_dies() -> None:
    """Let each rank wait for the next one, inside XLA; the last one is killed."""
    group, transport, _ = join()
    rank = group.rank()
    if rank == 3:
        transport.expect(Message("B", 3, 0, 0), 2)
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
    with group.rendezvous.reporting():
        for mb in range(6):
            name = Message("F", rank, mb, 0)
            received = transport.recv(name, rank + 1, layouts())
            if rank:
                transport.send(Message("F", rank - 1, mb, 0), rank - 1, received)
        transport.settle()


def test_ranks_that_wait_inside_of_xla_learn_of_a_death_elsewhere(
    worlds: Worlds,
) -> None:
    start_s = time.monotonic()
    outcomes = worlds.run_outcomes(last_of_four_dies, ranks=4, devices=1)
    assert time.monotonic() - start_s < 60
    for rank in (0, 1, 2):
        assert "TransportError: " in survivor(outcomes, rank)
        assert "rank 3 is gone" in survivor(outcomes, rank)


def unknown_edge() -> str:
    group, transport, peer = join()
    transport.expect(Message("F", 1, 0, 0), peer)
    if group.rank() == 0:
        transport.send(Message("F", 9, 2, 0), peer, values())
    start_s = time.monotonic()
    try:
        while time.monotonic() - start_s < 20:
            transport.settle()
            time.sleep(0.1)
    except RuntimeError as error:
        assert time.monotonic() - start_s < 8
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_message_that_nobody_expects_is_told_on_every_rank(worlds: Worlds) -> None:
    for text in worlds.run(unknown_edge, ranks=2, devices=2, keep_workers=True):
        assert text.startswith(
            "TransportError: rank 1 got 9F2 (stage 9, microbatch 2, from stage 0) from "
            "rank 0: "
        )


def other_number_of_devices() -> str:
    group, transport, peer = join()
    try:
        if group.rank() == 0:
            four = Tiling(shape=(4, 2), grid=(4, 1), tiles=(0, 1, 2, 3))
            layout = [v._replace(tiling=four) for v in layouts()]
            route = transport.send_route(NAME, peer, layout)
            xla_compat.materialize([send_op(route, values(), layouts())])
        else:
            transport.recv(NAME, peer, layouts())
        transport.settle()
        group.rendezvous.exchange("end", None)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_with_other_numbers_of_devices_are_told(worlds: Worlds) -> None:
    for text in worlds.run(
        other_number_of_devices, ranks=2, devices=2, keep_workers=True
    ):
        assert text.startswith(
            "TransportError: recv 1F0 (stage 1, microbatch 0, from stage 0) from"
        )
        assert re.search(r"expected shards .* on 2 devices .*, got .* on 4 dev", text)


def stranger() -> list[str]:
    """Let one who does not know the token report a failure to this rank."""
    _, transport, _ = join()
    with logged() as texts:
        engine = Engine(7, 1, 5.0, b"?" * 16, "localhost")
        engine.connect(0, transport.engine.address(), 0)
        engine.report(0, "7\nValueError\n\nlet me in")
        time.sleep(1)
        transport.settle()
        engine.close(1.0)
    return texts


def test_a_stranger_is_refused_and_logged(worlds: Worlds) -> None:
    ((text,),) = worlds.run(stranger, ranks=1, devices=1)
    assert "an unknown peer that calls itself rank 7" in text


def over_tcp() -> None:
    os.environ["UCX_TLS"] = "tcp"
    try:
        group, transport, peer = join()
        big = on_device(torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024))
        for number in range(4):
            transport.send(Message("F", 1, number, 0), peer, [big, *values(number)])
        for number in range(4):
            wanted = [ShardLayout.of_tensor(big), *layouts()]
            found = transport.recv(Message("F", 1, number, 0), peer, wanted)
            transport.settle()
            assert_same(found[0], big)
            assert_same(found[1], values(number)[0])
        dist.barrier()
    finally:
        del os.environ["UCX_TLS"]


def test_tcp_carries_the_same(worlds: Worlds) -> None:
    worlds.run(over_tcp, ranks=2, devices=2, keep_workers=True)


def large_in_turns(last: str) -> int:
    """Exchange large messages; return how many blocks of shared memory are mapped."""
    _, transport, peer = join()
    host = torch.arange(1 << 20, dtype=torch.float32)
    layout = [ShardLayout.of_tensor(on_device(host))]
    for step in range(20):
        for number in range(3):
            name = Message("F", 1, number, 0)
            transport.send(name, peer, [on_device(host + step + number)])
        for number in range(3):
            (found,) = transport.recv(Message("F", 1, number, 0), peer, layout)
            transport.settle()
            assert_same(found, on_device(host + step + number))
    if last == "killed" and dist.get_rank() == 0:
        transport.send(NAME, peer, [on_device(host)])
        os.kill(os.getpid(), signal.SIGKILL)
    if last == "killed":
        for number in range(2):
            transport.recv(Message("F", 1, number, 0), peer, layout)
            transport.settle()
    dist.barrier()
    return Path("/proc/self/maps").read_text().count("memfd:torch_xla_pp")


@pytest.mark.parametrize("devices", [1, 2])
def test_large_messages_to_the_same_host_share_few_blocks(
    worlds: Worlds, devices: int
) -> None:
    blocks = worlds.run(large_in_turns, ranks=2, devices=devices, args=("",))
    # Three messages are on their way at once, both ways, and some are freed late.
    assert all(2 <= count <= 16 for count in blocks)


def test_a_peer_killed_after_a_large_message(worlds: Worlds) -> None:
    outcomes = worlds.run_outcomes(large_in_turns, ranks=2, devices=1, args=("killed",))
    assert "rank 0 is gone" in survivor(outcomes, 1)


def large_and_gone() -> None:
    """Send more than fits into a network's buffers, and leave the group at once."""
    group, transport, peer = join()
    transport.expect(Message("F", 1, 0, 0), peer)
    big = on_device(torch.arange(1 << 24, dtype=torch.float32))
    group.rendezvous.exchange("ready", None)
    if group.rank() == 0:
        transport.send(NAME, peer, [big])
    else:
        (found,) = transport.recv(NAME, peer, [ShardLayout.of_tensor(big)])
        transport.settle()
        assert_same(found, big)
    dist.destroy_process_group()


def test_a_farewell_does_not_overtake_a_large_message(worlds: Worlds) -> None:
    worlds.run(large_and_gone, ranks=2, devices=1)


def killed_over_tcp() -> None:
    os.environ["UCX_TLS"] = "tcp"
    group, transport, peer = join()
    transport.expect(Message("F", 1, 0, 0), peer)
    if group.rank() == 0:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    transport.recv(NAME, peer, layouts())
    transport.settle()


def test_a_death_is_noticed_over_tcp(worlds: Worlds) -> None:
    outcomes = worlds.run_outcomes(killed_over_tcp, ranks=2, devices=1)
    assert "rank 0 is gone" in survivor(outcomes, 1)


SCRIPT = """
import logging, os
from torch_xla_pp.native import loader
logging.basicConfig()
def library():
    raise loader.Unavailable("it is hidden")
loader.library = library
import torch.distributed as dist
import torch_xla_pp as xpp
xpp.device()
dist.init_process_group("xla_pp")
from torch_xla_pp.transport import of_group
print("transport", of_group(None).transport.name)
other = dist.new_group([0])
print("transport", of_group(other).transport.name)
"""


@pytest.mark.parametrize("wanted", ["", "in_graph"])
def test_without_the_library_the_host_is_used_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("TORCH_XLA_PP_TRANSPORT", wanted)
    if not wanted:
        output = torchrun(script, ranks=1, devices=1)
        assert output.count("transport host") == 2
        assert output.count("because it is hidden") == 1
        return
    with pytest.raises(AssertionError) as failed:
        torchrun(script, ranks=1, devices=1)
    text = "TransportError: TORCH_XLA_PP_TRANSPORT=in_graph: it is"
    assert text in str(failed.value)


def two_groups_in_turn(ports: tuple[int, int]) -> None:
    for number, port in enumerate(ports):
        os.environ["MASTER_PORT"] = str(port)
        group, transport, peer = join()
        transport.send(NAME, peer, values(number))
        (found, _) = transport.recv(NAME, peer, layouts())
        transport.settle()
        assert_same(found, values(number)[0])
        part = dist.new_group([0, 1])
        assert part is not None
        dist.barrier()
        if number == 0:
            dist.destroy_process_group()


def test_a_new_process_group_in_the_same_process_works(worlds: Worlds) -> None:
    ports = free_port(), free_port()
    worlds.run(two_groups_in_turn, ranks=2, devices=2, args=(ports,), keep_workers=True)
