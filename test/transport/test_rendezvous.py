"""Ranks agree, and learn of each other's errors; here they share one process."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from torch_xla_pp.errors import PipelineError, StageShapeError, TransportTimeout
from torch_xla_pp.transport import Rendezvous

pytestmark = pytest.mark.pure


def ranks(size: int, timeout_s: float = 20.0) -> list[Rendezvous]:
    store = HashStore()
    return [Rendezvous(store, rank, size, timeout_s) for rank in range(size)]


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run one call per rank at once; an exception is a result."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_a_published_value_can_be_read_by_all_and_again() -> None:
    a, b, c = ranks(3)
    b.publish("plan", {"stages": 2})
    assert [r.read("plan", 1) for r in (a, c, c)] == [{"stages": 2}] * 3


def test_every_exchange_of_a_name_is_a_new_round() -> None:
    group = ranks(2)
    for number in range(4):
        values = together(
            [lambda r=r: r.exchange("x", (number, r.rank)) for r in group]  # noqa: B023
        )
        assert values == [[(number, 0), (number, 1)]] * 2


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("bad batch"), ValueError),
        (TypeError("bad batch"), TypeError),
        (StageShapeError("bad batch"), StageShapeError),
        (NotImplementedError("bad batch"), RuntimeError),
        (OSError("bad batch"), PipelineError),
    ],
)
def test_a_report_is_raised_on_the_others_with_its_type_and_text(
    error: Exception, kind: type[Exception]
) -> None:
    a, b, c = ranks(3)
    b.report(error, "in step 3")
    for rank in (a, c):
        with pytest.raises(
            kind, match=r"^bad batch \(raised on rank 1\): in step 3$"
        ) as caught:
            rank.check()
        assert type(caught.value) is kind


def test_each_rank_raises_one_failure_once() -> None:
    a, b = ranks(2)
    assert a.calm()
    a.report(ValueError("first"))
    b.report(ValueError("second, in the same step"))
    a.check()
    b.check()
    b.report(ValueError("next step"))
    assert not a.calm()
    with pytest.raises(ValueError, match="next step"):
        a.check()
    assert a.calm()
    assert b.calm()


def test_a_waiting_rank_learns_of_a_failure_at_once() -> None:
    a, b = ranks(2)

    def fail() -> None:
        time.sleep(0.3)
        with b.reporting():
            raise ValueError("no data")

    start = time.monotonic()
    waited, failed = together([lambda: a.exchange("x", 1), fail])
    assert time.monotonic() - start < 3
    assert isinstance(waited, ValueError)
    assert str(waited) == "no data (raised on rank 1)"
    assert str(failed) == "no data"


def test_a_peers_error_is_not_reported_again() -> None:
    a, b, c = ranks(3)
    a.report(ValueError("first"))
    with pytest.raises(PipelineError), b.reporting():
        try:
            b.check()
        except ValueError as error:
            raise PipelineError("step failed") from error
    with pytest.raises(ValueError, match=r"^first"):
        c.check()
    for rank in (a, b, c):
        rank.check()


def test_rounds_agree_again_after_a_failure() -> None:
    a, b = ranks(2)
    together([lambda: a.exchange("x", 0), lambda: b.exchange("x", 0)])

    def fail() -> None:
        with b.reporting():
            raise ValueError("before the exchange")

    together([lambda: a.exchange("x", "void"), fail])
    assert (
        together([lambda: a.exchange("x", 1), lambda: b.exchange("x", 2)])
        == [[1, 2]] * 2
    )


def test_a_timeout_names_the_rank_the_matter_and_the_seconds() -> None:
    a, _ = ranks(2, timeout_s=0.3)
    with pytest.raises(
        TransportTimeout, match=r"rank 0 waited 0.3 s for rank 1: 'plan'"
    ):
        a.read("plan", 1)


class Pipe:
    """A channel straight into a peer."""

    def __init__(self, peer: Rendezvous) -> None:
        self.peer = peer
        self.ended: list[int] = []

    def report(self, generation: int, report: str) -> None:
        self.peer.tell(generation, report)

    def end(self, generation: int) -> None:
        self.ended.append(generation)


def test_what_a_channel_told_is_raised_once_without_the_store() -> None:
    a, b = ranks(2)
    pipe = Pipe(b)
    a.join(pipe)
    a.report(ValueError("first\nand more"), "in\nstep 3")
    b.tell(0, "7\nTypeError\n\nlater")
    with pytest.raises(
        ValueError, match=r"first\nand more .raised on rank 0.: in step"
    ):
        b.check()
    b.tell(0, "7\nTypeError\n\ntoo late")
    assert b.calm()
    assert pipe.ended == [0]


def test_an_error_is_passed_on_to_another_group_as_it_came() -> None:
    """Rank 1 of one group is rank 0 of another, and rank 5 of the job."""
    one, other = ranks(2), HashStore()
    first = Rendezvous(other, 0, 2, 20.0, job_rank=5)
    second = Rendezvous(other, 1, 2, 20.0, job_rank=6)
    one[0].report(ValueError("bad"), "in step 3")
    with pytest.raises(ValueError), one[1].reporting(), first.reporting():
        one[1].check()
    with pytest.raises(ValueError, match=r"^bad \(raised on rank 0\): in step 3$"):
        second.check()
    first.report(ValueError("own"))
    with pytest.raises(ValueError, match=r"^own \(raised on rank 5\)$"):
        second.check()
    assert [r.generation for r in (*one, first, second)] == [1, 1, 2, 2]


def test_an_error_is_reported_once() -> None:
    a, b = ranks(2)
    error = ValueError("bad")
    with pytest.raises(ValueError), a.reporting():
        a.report(error)
        raise error
    assert a.generation == 1
    with pytest.raises(ValueError):
        b.check()
    assert b.calm()
