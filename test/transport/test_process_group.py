"""The backend "xla_pp" moves XLA and CPU tensors between worlds."""

import contextlib
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import Spec, assert_same, gathers, on_device, start
from torch import Tensor
from torchrun import torchrun

from torch_xla_pp import xla_compat
from torch_xla_pp.testing import Worlds
from torch_xla_pp.transport import XlaPpProcessGroup, of_group

pytestmark = pytest.mark.worlds

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def counted(*shape: int, start: int = 0) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).float() + start


def cases() -> list[tuple[Tensor, Spec | None]]:
    """Values and how they are split, for two or four devices."""
    of_dtypes: list[tuple[Tensor, Spec | None]] = [
        (counted(4, 2).to(dtype), spec)
        for dtype in DTYPES
        for spec in (None, ("a", None))
    ]
    return [
        *of_dtypes,
        (torch.tensor(3.5), None),
        (torch.zeros(0, 3), None),
        (torch.zeros(0, 4), (None, "a")),
        (counted(4, 4), (None, "a")),
        (counted(4, 4), ("a", "b")),
        (counted(4, 4), ("b", "a")),
        (counted(8, 4), (("a", "b"), None)),
        (counted(4, 4), (None, None)),
        (counted(2, 3, 4), (None, None, "a")),
    ]


RESTARTED = """
import os, signal, time
import torch
import torch.distributed as dist
from torch_xla_pp.transport import of_group

rank, attempt = (int(os.environ[n]) for n in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
if attempt and rank == 0:
    time.sleep(2)
dist.init_process_group("xla_pp")
group = of_group(None)
total = torch.ones(())
dist.all_reduce(total)
assert total == 2 and group.rendezvous.exchange("attempt", attempt) == [attempt] * 2
if not attempt and rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_that_are_started_again_find_each_other(tmp_path: Path) -> None:
    """torchrun keeps the store, with the addresses of ranks that are gone."""
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    torchrun(script, ranks=2, devices=1, restarts=1)


# --- point to point


def send_every_kind() -> None:
    start()
    before = gathers()
    for value, spec in cases():
        tensor = on_device(value, spec)
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
            continue
        bare = torch.zeros_like(value, device="xla")
        dist.recv(bare, 0)
        assert_same(bare, tensor)
    if dist.get_rank() == 0:
        pending = on_device(counted(4, 2), ("a", None)) * 2
        dist.send(pending, 1)
    else:
        marked = on_device(torch.zeros(4, 2), ("a", None))
        dist.recv(marked, 0)
        assert_same(marked, on_device(counted(4, 2) * 2, ("a", None)))
    assert gathers() == before
    # No program keeps an uneven split; the value is right.
    if dist.get_rank() == 0:
        dist.send(on_device(counted(5, 3), ("a", None)), 1)
    else:
        uneven = torch.zeros(5, 3, device="xla")
        dist.recv(uneven, 0)
        torch.testing.assert_close(uneven.cpu(), counted(5, 3))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_every_kind_of_tensor_keeps_value_and_sharding(
    worlds: Worlds, devices: int
) -> None:
    worlds.run(send_every_kind, ranks=2, devices=devices)


def order_is_by_tag() -> None:
    group = start()
    rank = dist.get_rank()
    peer = 1 - rank
    split: Spec = ("a", None)

    # Both directions at once, more than a socket buffers, nobody receives yet.
    big = on_device(torch.full((1024, 1024), float(rank)), split)
    sent = [dist.isend(big, peer, tag=tag) for tag in (1, 2, 3, 4)]
    for tag in (4, 2, 1, 3):
        into = torch.zeros(1024, 1024, device="xla")
        dist.recv(into, peer, tag=tag)
        assert_same(into, on_device(torch.full((1024, 1024), float(peer)), split))
    assert all(work.wait() and work.is_completed() for work in sent)

    # Many in flight; receives of one tag are waited for in any order.
    for i in range(64):
        dist.isend(on_device(counted(4, 2, start=i), split), peer, tag=i % 4)
    into_all = [torch.zeros(4, 2, device="xla") for _ in range(64)]
    works = [dist.irecv(t, peer, tag=i % 4) for i, t in enumerate(into_all)]
    for work in reversed(works):
        assert work.wait()
    for i, tensor in enumerate(into_all):
        assert_same(tensor, on_device(counted(4, 2, start=i), split))

    # A receive that has not been waited for, and one without a message.
    dist.barrier()
    later = torch.zeros(2, device="xla")
    work = dist.irecv(later, peer, tag=9)
    assert not work.is_completed()
    dist.barrier()
    dist.send(on_device(torch.ones(2)), peer, tag=9)
    while not work.is_completed():
        pass
    assert_same(later, on_device(torch.ones(2)))
    with pytest.raises(ValueError, match=r"tag: expected a number from 0 on, got -1"):
        group.send([later], peer, -1)
    with pytest.raises(ValueError, match="expected a source rank for an XLA tensor"):
        dist.recv(later)

    # What is received may be a part of a tensor, a parameter, a buffer filled before.
    whole = torch.zeros(4, 2, device="xla")
    weight = torch.nn.Parameter(torch.zeros(4, 2, device="xla"))
    idiom = torch.nn.Parameter(torch.zeros(4, 2, device="xla"))
    xla_compat.materialize([weight, idiom])
    dist.send(on_device(torch.ones(2, 2)), peer)
    for _ in range(2):
        dist.send(on_device(counted(4, 2), split), peer)
    dist.recv(whole[2:], peer)
    dist.recv(weight, peer)
    dist.recv(idiom.data, peer)
    assert whole.cpu().tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert weight.is_leaf and weight.requires_grad
    assert_same(weight, on_device(counted(4, 2), split))
    assert_same(idiom, on_device(counted(4, 2), split))


def test_messages_match_by_tag_then_order_and_sends_never_block(
    worlds: Worlds,
) -> None:
    worlds.run(order_is_by_tag, ranks=2, devices=2)


def send_to_oneself_and_in_batches() -> None:
    start()
    rank = dist.get_rank()
    peer = 1 - rank
    value = counted(4, 2, start=rank)
    for tensor in (on_device(value, ("a", None)), value):
        first, second = torch.zeros_like(value), torch.zeros_like(value)
        if tensor.device.type == "xla":
            first, second = first.to("xla"), second.to("xla")
        early = dist.irecv(first, rank, tag=3)
        dist.isend(tensor, rank, tag=3)
        dist.isend(tensor + 1, rank, tag=3)
        late = dist.irecv(second, rank, tag=3)
        late.wait()
        early.wait()
        if tensor.device.type == "xla":
            assert_same(first, on_device(value, ("a", None)))
            assert_same(second, on_device(value + 1, ("a", None)))
        else:
            torch.testing.assert_close([first, second], [value, value + 1])

    into = [torch.zeros(4, 2, device="xla") for _ in range(2)]
    host = torch.zeros(4, 2)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, into[0], peer),
            dist.P2POp(dist.isend, on_device(value, ("a", None)), peer),
            dist.P2POp(dist.irecv, host, peer),
            dist.P2POp(dist.isend, value, peer),
            dist.P2POp(dist.isend, on_device(value * 2), peer),
            dist.P2POp(dist.irecv, into[1], peer),
        ]
    )
    assert len(works) == 6
    for work in works:
        work.wait()
    theirs = counted(4, 2, start=peer)
    assert_same(into[0], on_device(theirs, ("a", None)))
    assert_same(into[1], on_device(theirs * 2))
    torch.testing.assert_close(host, theirs)

    objects: list[Any] = [{"rank": rank}, "text"]
    if rank == 0:
        dist.send_object_list(objects, 1, device=torch.device("xla"))
    else:
        dist.recv_object_list(objects, 0, device=torch.device("xla"))
    assert objects == [{"rank": 0}, "text"]


def test_messages_to_oneself_and_batches_arrive(worlds: Worlds) -> None:
    worlds.run(send_to_oneself_and_in_batches, ranks=2, devices=2)


# --- collectives


def collectives_of_cpu_tensors() -> None:
    group = start()
    rank = dist.get_rank()
    assert dist.get_backend() == "xla_pp"

    total = torch.tensor([1.0 + rank])
    dist.all_reduce(total)
    assert total.item() == 3
    for root in (0, 1):
        value = torch.tensor([rank])
        dist.broadcast(value, root)
        assert value.item() == root
    parts = [torch.zeros(2) for _ in range(2)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    assert [part[0].item() for part in parts] == [0, 1]
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    shared = [rank]
    dist.broadcast_object_list(shared, 1)
    assert shared == [1]
    dist.barrier()
    into = torch.zeros(3)
    work = dist.irecv(into, 1 - rank, tag=7)
    dist.send(torch.full((3,), float(rank)), 1 - rank, tag=7)
    work.wait()
    assert into.tolist() == [1.0 - rank] * 3

    grid = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    assert of_group(grid.get_group("pp")).size() == 2
    alone = dist.new_group([1])
    swapped = dist.new_group([1, 0])
    if rank == 1:
        assert isinstance(alone, XlaPpProcessGroup)
        assert of_group(alone).rank() == 0
        assert of_group(alone).rendezvous.exchange("x", 5) == [5]
    else:
        with pytest.raises(ValueError, match="expected a group with this rank in it"):
            of_group(alone)
    assert of_group(swapped).rendezvous.exchange("x", rank) == [0, 1]
    tensor = on_device(torch.full((2,), float(rank)))
    got = torch.zeros(2, device="xla")
    dist.send(tensor, 1 - rank, group=swapped)
    dist.recv(got, 1 - rank, group=swapped)
    assert_same(got, on_device(torch.full((2,), 1.0 - rank)))
    assert of_group(None) is group


def collectives_on_one_core() -> None:
    """Threads that take turns on a core find deadlocks that others rarely do."""
    start()
    cores = os.sched_getaffinity(0)
    run_on({min(cores)})
    for number in range(200):
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, number)
        dist.barrier()
        assert objects == [number, number]
    run_on(cores)


def run_on(cores: set[int]) -> None:
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task), cores)


def test_collectives_end_while_gloo_drops_the_tensors_of_others(worlds: Worlds) -> None:
    worlds.run(collectives_on_one_core, ranks=2, timeout_s=60)


def other_collectives_of_cpu_tensors() -> None:
    """Those that torch hands to groups by other methods."""
    start()
    rank = dist.get_rank()
    got = torch.zeros(2)
    dist.all_to_all_single(got, torch.tensor([10.0, 11.0]) + 2 * rank)
    assert got.tolist() == [10 + rank, 12 + rank]
    part = torch.zeros(1)
    dist.reduce_scatter(part, [torch.tensor([1.0 + rank]), torch.tensor([5.0 + rank])])
    assert part.item() == (3, 11)[rank]
    together = torch.zeros(2)
    dist.all_gather_into_tensor(together, torch.tensor([float(rank)]))
    assert together.tolist() == [0, 1]
    values = [torch.tensor([1.0 + rank]), torch.tensor([2.0 + rank])]
    dist.all_reduce_coalesced(values)
    assert [value.item() for value in values] == [3, 5]
    found = [torch.zeros(1) for _ in range(2)] if rank == 0 else None
    dist.gather(torch.tensor([float(rank)]), found)
    assert found is None or [value.item() for value in found] == [0, 1]
    given = torch.zeros(1)
    sources = [torch.tensor([7.0]), torch.tensor([8.0])] if rank == 0 else None
    dist.scatter(given, sources)
    assert given.item() == 7 + rank
    total = torch.tensor([1.0])
    dist.reduce(total, 0)
    assert rank or total.item() == 2


def test_other_collectives_of_cpu_tensors_work_as_with_gloo(worlds: Worlds) -> None:
    worlds.run(other_collectives_of_cpu_tensors, ranks=2)


def test_cpu_tensors_objects_and_groups_work_as_with_gloo(worlds: Worlds) -> None:
    worlds.run(collectives_of_cpu_tensors, ranks=2, devices=2)


def collectives_of_xla_tensors() -> None:
    start()
    rank = dist.get_rank()
    before = gathers()
    op = dist.ReduceOp
    for spec in (None, ("a", None), ("a", "b")):
        for dtype in DTYPES:
            mine = (counted(4, 2) + 1 + rank).to(dtype)
            other = (counted(4, 2) + 2 - rank).to(dtype)
            value = on_device(mine, spec)
            dist.all_reduce(value)
            assert_same(value, on_device((mine + other).to(dtype), spec))
            value = on_device(mine, spec)
            dist.broadcast(value, 1)
            assert_same(value, on_device((counted(4, 2) + 2).to(dtype), spec))
            into = [torch.zeros(4, 2, dtype=dtype, device="xla") for _ in range(2)]
            dist.all_gather(into, on_device(mine, spec))
            for r in range(2):
                assert_same(into[r], on_device((counted(4, 2) + 1 + r).to(dtype), spec))
        a, b = counted(4, 2) + 1 + rank, counted(4, 2) + 2 - rank
        for kind, result in (
            (op.AVG, (a + b) / 2),
            (op.PRODUCT, a * b),
            (op.MIN, torch.minimum(a, b)),
            (op.MAX, torch.maximum(a, b)),
        ):
            value = on_device(a, spec)
            dist.all_reduce(value, kind)
            assert_same(value, on_device(result, spec))
    first, second = on_device(torch.ones(2)), on_device(torch.ones(2))
    works = [dist.all_reduce(t, async_op=True) for t in (first, second)]
    for work in works if rank else reversed(works):
        work.wait()
    assert_same(second, on_device(torch.full((2,), 2.0)))
    assert gathers() == before

    joined = torch.zeros(4, 3, device="xla")
    dist.all_gather_into_tensor(joined, on_device(counted(2, 3, start=rank)))
    want = torch.cat([counted(2, 3), counted(2, 3, start=1)])
    torch.testing.assert_close(joined.cpu(), want)


def test_collectives_keep_the_sharding_and_gather_nothing(worlds: Worlds) -> None:
    worlds.run(collectives_of_xla_tensors, ranks=2, devices=2)


# --- wrong use


def misfits() -> list[str]:
    start()
    rank = dist.get_rank()
    found = []

    def note(call: Any, *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
            found.append("nothing")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")

    split = on_device(torch.zeros(4, 2), ("a", None))
    if rank == 0:
        for _ in range(3):
            dist.send(split, 1)
    else:
        note(dist.recv, torch.zeros(4, 3, device="xla"), 0)
        note(dist.recv, torch.zeros(4, 2, device="xla", dtype=torch.int32), 0)
        note(dist.recv, on_device(torch.zeros(4, 2), (None, "a")), 0)
    dist.barrier()
    note(dist.all_reduce, split if rank else on_device(torch.zeros(4, 2)))
    if rank:
        note(dist.all_reduce, split)
    else:
        note(dist.all_gather, [split.clone(), split.clone()], split)
    note(dist.all_reduce, on_device(torch.ones(2)), dist.ReduceOp.BOR)
    return found


def test_tensors_that_do_not_fit_are_named(worlds: Worlds) -> None:
    zero, one = worlds.run(misfits, ranks=2, devices=2)
    sent = r"got float32\[4, 2\] \{devices=\[2,1\]0,1\} on 2 devices"
    alike = "expected the same operation, shape, dtype and sharding on every rank"
    patterns = [
        rf"TransportError: recv from rank 0: expected float32\[4, 3\] .*{sent}",
        rf"TransportError: recv from rank 0: expected int32\[4, 2\] .*{sent}",
        rf"recv from rank 0: expected .* \{{devices=\[1,2\]0,1\}} .*{sent}",
        rf"all_reduce SUM: {alike}, got rank 0: .*replicated.*rank 1: .*devices",
        rf"all_reduce SUM: {alike}, got rank 0: all_gather float32.*rank 1: all_red",
        r"ValueError: all_reduce: expected one of SUM, AVG.*got .*float32",
    ]
    for text, pattern in zip(one, patterns, strict=True):
        assert re.search(pattern, text), (text, pattern)
    assert len(zero) == 3
    assert all("TransportError: all_" in text for text in zero[:2])


def wrong_backends() -> None:
    xla_compat.enable_spmd()
    with pytest.raises(ValueError, match="expected torch.distributed to be init"):
        of_group(None)
    with pytest.raises(
        ValueError,
        match=r'backend "xla" does not work under SPMD: .*init_process_group\("xla_pp"',
    ):
        dist.init_process_group("xla", init_method="env://")


def plain_gloo() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with pytest.raises(
        ValueError, match=r"backend 'xla_pp', got 'gloo'. Call dist.init_process_group"
    ):
        of_group(None)


def test_other_backends_are_refused_with_advice(worlds: Worlds) -> None:
    worlds.run(wrong_backends, ranks=2, devices=2)
    worlds.run(plain_gloo, ranks=2, devices=2)
