"""Values with another layout on the peer, which may have other devices."""

import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from jobs import (
    DTYPES,
    Spec,
    assert_same,
    boundary_values,
    mesh,
    on_device,
    same_draws,
    start,
)
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.mesh import Tiling
from torch_xla_pp.testing import Worlds
from torch_xla_pp.transport import (
    InGraphTransport,
    Message,
    ShardLayout,
    receive_op,
    send_op,
)

pytestmark = pytest.mark.worlds

NAME = Message("F", 1, 0, 0)
FIXED: list[tuple[tuple[int, ...], Spec, Spec]] = [
    # Shape, and its layout on rank 0 and on rank 1.
    ((4, 6), ("a", "b"), ("a", None)),
    ((6, 5), (None, "b"), ("a", None)),
    ((12, 2, 3), (("a", "b"), None, None), (None, None, "a")),
    ((5,), (None,), ("a",)),
    ((7, 3), ("b", None), (None, None)),
    ((0, 3), (None, None), (None, "a")),
    ((), (), ()),
    # Of more than a step of shared memory for each device, in pieces of many rows.
    ((1200, 1600), ("a", None), (None, ("a", "b"))),
    ((1200, 1600), (None, "b"), ("b", None)),
]


def fixed_values(number: int, rank: int) -> list[Tensor]:
    """Make values of many dtypes in a rank's layout, of which each has its own."""
    values = []
    for place, (shape, *specs) in enumerate(FIXED):
        count = max(1, torch.Size(shape).numel())
        host = torch.arange(number, number + count)[: torch.Size(shape).numel()]
        dtype = DTYPES[place % len(DTYPES)]
        values.append(on_device(host.reshape(shape).to(dtype), specs[rank]))
    return values


def exchanged_tilings(group: object, values: Sequence[Tensor]) -> list[list[Tiling]]:
    """Exchange the layouts of values, as stages do before their first step."""
    own = [ShardLayout.of_tensor(value).tiling for value in values]
    return group.rendezvous.exchange("tilings", own)  # type: ignore[attr-defined]


def exchange_values(transport: str) -> None:
    group = start(transport=transport)
    rank, peer = group.rank(), 1 - group.rank()
    there = exchanged_tilings(group, fixed_values(0, rank))[peer]
    layouts = [ShardLayout.of_tensor(value) for value in fixed_values(0, rank)]
    even = [i for i, (shape, *specs) in enumerate(FIXED) if is_even(shape, specs[rank])]
    for mb in range(3):
        name = NAME._replace(microbatch=mb)
        group.transport.send(name, peer, fixed_values(mb + rank, rank), there)
        if mb == 0 and isinstance(group.transport, InGraphTransport):
            check_sizes(group.transport, layouts, there)
        found = group.transport.recv(name, peer, layouts, there)
        group.transport.settle()
        wanted = fixed_values(mb + peer, rank)
        # What is split unevenly becomes whole when it leaves a program.
        for i in even:
            assert_same(found[i], wanted[i])


def check_sizes(
    transport: InGraphTransport, layouts: list[ShardLayout], there: list[Tiling]
) -> None:
    """Check that each element has arrived once, in a message per device of the peer."""
    limit_s = time.monotonic() + 30
    while transport.engine.stats().num_messages < len(there[0].tiles):
        assert time.monotonic() < limit_s
        time.sleep(0.01)
    sizes = [torch.Size(x.shape).numel() * x.dtype.itemsize for x in layouts]
    assert transport.engine.stats().held_bytes == sum(sizes)


def is_even(shape: tuple[int, ...], spec: Spec) -> bool:
    sizes = dict(zip(*(mesh().axis_names, mesh().mesh_shape), strict=True))
    parts = [sizes[a] if isinstance(a, str) else 1 for a in spec]
    return all(size % n == 0 for size, n in zip(shape, parts, strict=True))


@pytest.mark.parametrize("transport", ["in_graph", "host"])
def test_values_are_laid_out_anew_on_other_devices(
    worlds: Worlds, transport: str
) -> None:
    worlds.run(
        exchange_values,
        ranks=2,
        devices=(4, 3),
        args=(transport,),
        keep_workers=True,
    )


def random_values() -> int:
    """Exchange what Hypothesis draws, each rank with a layout of its own."""
    group = start(transport="in_graph")
    transport = group.transport
    assert isinstance(transport, InGraphTransport)
    rank, peer = group.rank(), 1 - group.rank()
    count = 0

    @same_draws(15)
    @given(boundary_values())
    def exchange(drawn: list[tuple[Tensor, Spec]]) -> None:
        nonlocal count
        count += 1
        own = [on_device(v, spec_on(rank, v, spec)) for v, spec in drawn]
        layouts = [ShardLayout.of_tensor(value) for value in own]
        there = exchanged_tilings(group, own)[peer]
        route = transport.send_route(NAME, peer, layouts, there)
        xla_compat.materialize([send_op(route, own, layouts)])
        route = transport.receive_route(NAME, peer, layouts, there)
        received, token = receive_op(route, layouts)
        # Uneven values become whole when they leave a program: compare inside it.
        checks = [
            (got == want).all()
            for got, want in zip(received, own, strict=True)
            if got.numel()
        ]
        xla_compat.materialize([*checks, token])
        transport.settle()
        assert all(check.item() for check in checks), drawn

    exchange()
    assert transport.engine.stats() == (0, 0, 0)
    return count


def spec_on(rank: int, value: Tensor, spec: Spec) -> Spec:
    """Turn the spec of rank 0 around for rank 1; empty values are not split there."""
    if not rank:
        return spec
    return spec[::-1] if value.numel() else (None,) * value.dim()


def test_any_value_arrives_whole(worlds: Worlds) -> None:
    counts = worlds.run(
        random_values, ranks=2, devices=(4, 3), timeout_s=200, keep_workers=True
    )
    assert counts[0] == counts[1] == 15
