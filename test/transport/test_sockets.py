"""A rank that leaves is told from one that is lost, whoever connects with it when."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from transport.connections import end, sockets_of, wait

from torch_xla_pp.errors import TransportError
from torch_xla_pp.transport import Rendezvous
from torch_xla_pp.transport.sockets import LEFT, Sockets

pytestmark = pytest.mark.pure

Fates = dict[int, tuple[str, bool]]


def connected(size: int) -> tuple[list[Sockets], list[Fates]]:
    """Return the connections of some ranks, and what each hears of others."""
    group = sockets_of(size)
    heard: list[Fates] = [{} for _ in group]
    for sockets, fates in zip(group, heard, strict=True):
        sockets.on("control", lambda *_: None)
        sockets.on("data", lambda *_: None)
        sockets.on_gone(
            lambda rank, why, is_lost, fates=fates: fates.update({rank: (why, is_lost)})
        )
        sockets.open()
    return group, heard


def send_both_ways(first: Sockets, second: Sockets) -> None:
    """Let two ranks make a connection each, at once."""
    for source, target in ((first, second), (second, first)):
        source.send(target.rank, "data", "hello")


def close(group: Sequence[Sockets]) -> None:
    for sockets in group:
        sockets.close(1.0)


def test_a_rank_that_connects_with_one_that_is_leaving_hears_its_farewell() -> None:
    group, heard = connected(3)
    assert group[2].close(20.0)
    group[1].send(2, "data", "late")
    wait(lambda: 2 in heard[1])
    assert heard[1][2] == (LEFT, False)
    close(group)


def test_a_farewell_counts_on_either_of_two_connections() -> None:
    for _ in range(20):
        group, heard = connected(3)
        send_both_ways(group[1], group[2])
        time.sleep(0.01)
        assert group[2].close(20.0)
        wait(lambda heard=heard: 2 in heard[1])
        assert heard[1][2] == (LEFT, False)
        close(group)


def test_a_rank_of_two_connections_is_lost_with_the_last_of_them() -> None:
    group, heard = connected(3)
    send_both_ways(group[1], group[2])
    time.sleep(0.1)
    end(group[2])
    wait(lambda: 2 in heard[1] and 2 in heard[0])
    assert "its connection is lost" in heard[1][2][0]
    assert heard[1][2][1] and heard[0][2][1]
    close(group)


def test_a_rank_that_cannot_be_reached_is_not_lost_if_it_has_left() -> None:
    group = sockets_of(3)
    first, second, third = (Rendezvous(sockets, 20.0) for sockets in group)
    for sockets in group:
        sockets.open()
    second.publish("ready", None)
    third.read("ready", 1)
    tell = first._flood

    def tell_late(*content: Any, except_for: int | None = None) -> None:
        threading.Timer(3.0, tell, content, {"except_for": except_for}).start()

    first._flood = tell_late  # type: ignore[method-assign]
    assert group[2].close(1.0)
    # It listens no more.
    wait(lambda: not group[2]._tasks)
    group[1].send(2, "data", "too late")
    with pytest.raises(TransportError, match=f"rank 2 is gone: {LEFT}"):
        second.read("never", 2)
    assert first.calm() and second.calm()
    close(group)
