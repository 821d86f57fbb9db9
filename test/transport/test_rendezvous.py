"""Ranks agree, and learn of each other's errors; here they share one process."""

import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transport.connections import end, sockets_of, wait

from torch_xla_pp.errors import (
    PipelineError,
    StageShapeError,
    TransportError,
    TransportTimeout,
)
from torch_xla_pp.transport import Rendezvous
from torch_xla_pp.transport.sockets import Sockets

pytestmark = pytest.mark.pure


def ranks(size: int, timeout_s: float = 20.0) -> list[Rendezvous]:
    return [one_of(sockets, timeout_s) for sockets in sockets_of(size)]


def one_of(sockets: Sockets, timeout_s: float = 20.0, **args: Any) -> Rendezvous:
    rendezvous = Rendezvous(sockets, timeout_s, **args)
    sockets.open()
    return rendezvous


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
        wait(lambda rank=rank: not rank.calm())
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
    wait(lambda: not a.calm())
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
    wait(lambda: not b.calm() and not c.calm())
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


class Ears:
    """A listener that notes its reports."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, str, int]] = []
        self.steps: list[tuple[int, int]] = []
        self.ended: list[int] = []

    def report(self, generation: int, report: str, num_ended: int) -> None:
        self.reports.append((generation, report, num_ended))

    def end_step(self, generation: int, num_ended: int) -> None:
        self.steps.append((generation, num_ended))

    def end(self, generation: int) -> None:
        self.ended.append(generation)


def test_channels_are_told_of_own_and_foreign_failures_and_the_first_counts() -> None:
    a, b = ranks(2)
    own, foreign = Ears(), Ears()
    a.join(own)
    b.join(foreign)
    a.report(ValueError("first\nand more"), "in\nstep 3")
    wait(lambda: not b.calm())
    b.receive_report(0, "7\nTypeError\n\nlater")
    with pytest.raises(
        ValueError, match=r"first\nand more .raised on rank 0.: in step"
    ):
        b.check()
    b.receive_report(0, "7\nTypeError\n\ntoo late")
    assert b.calm()
    report = (0, "0\nValueError\nin step 3\nfirst\nand more", 0)
    assert own.reports == foreign.reports == [report]
    assert own.ended == foreign.ended == [0]


def test_an_error_is_passed_on_to_another_group_as_it_came() -> None:
    """Rank 1 of one group is rank 0 of another, and rank 5 of the job."""
    one, other = ranks(2), sockets_of(2)
    first, second = (one_of(s, job_rank=5 + s.rank) for s in other)
    one[0].report(ValueError("bad"), "in step 3")
    wait(lambda: not one[1].calm())
    with pytest.raises(ValueError), one[1].reporting(), first.reporting():
        one[1].check()
    wait(lambda: not second.calm())
    with pytest.raises(ValueError, match=r"^bad \(raised on rank 0\): in step 3$"):
        second.check()
    first.report(ValueError("own"))
    wait(lambda: not second.calm())
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
    wait(lambda: not b.calm())
    with pytest.raises(ValueError):
        b.check()
    time.sleep(0.1)
    assert b.calm()


def hearing(*ranks: Rendezvous) -> list[Ears]:
    """Join a listener to each rank."""
    found = [Ears() for _ in ranks]
    for rank, ears in zip(ranks, found, strict=True):
        rank.join(ears)
    return found


def test_a_report_of_a_later_step_is_held_until_this_one_has_ended() -> None:
    a, b, c = ranks(3)
    (told,) = hearing(b)
    for rank in (a, b, c, a):
        rank.end_step()
    a.report(ValueError("in the third step"))
    wait(lambda: told.reports == [(0, "0\nValueError\n\nin the third step", 2)])
    b.check()
    # What the second step still needs goes on.
    calls = [lambda: b.read("sum", 2), lambda: c.publish("sum", 7)]
    assert together(calls) == [7, None]
    assert b.calm()
    assert c.calm()
    b.end_step()
    assert told.steps == [(0, 1), (0, 2)]
    with pytest.raises(ValueError, match="in the third step"):
        b.check()
    # Steps are counted anew, and so are the reports of the next generation.
    for rank in (a, b):
        rank.end_step()
    a.report(ValueError("in the second step"))
    with pytest.raises(ValueError, match="in the second step"):
        b.read("anything", 2)


def test_a_failure_of_this_step_counts_before_one_of_a_later_step() -> None:
    a, b, c = ranks(3)
    told = hearing(b, c)
    a.end_step()
    a.report(ValueError("in the second step"))
    wait(lambda: all(ears.reports for ears in told))
    c.report(ValueError("in the first step"))
    with pytest.raises(ValueError, match="in the first step"):
        b.read("anything", 2)
    held = (0, "0\nValueError\n\nin the second step", 1)
    assert told[0].reports == [held, (0, "2\nValueError\n\nin the first step", 0)]
    b.check()


def test_linked_groups_hold_the_same_reports() -> None:
    """Rank 0 of both has evaluated with its pipeline alone before."""
    pipeline, replicas = ranks(2), ranks(2)
    for rank in pipeline:
        rank.end_step()
    pipeline[0].link(replicas[0])
    replicas[0].link(pipeline[0])
    pipeline[1].end_step()
    (told,), far = hearing(pipeline[0]), hearing(replicas[1])
    pipeline[1].report(ValueError("in the third step"))
    wait(lambda: bool(told.reports))
    assert pipeline[0].calm()
    for rank in (pipeline[0], replicas[0]):
        rank.end_step()
    for rank in (pipeline[0], replicas[0]):
        rank.tell_others()
    # The other replica is to end its first step, too.
    wait(lambda: [num_ended for _, _, num_ended in far[0].reports] == [1])
    assert replicas[1].calm()
    replicas[1].end_step()
    for rank in (pipeline[0], *replicas):
        with pytest.raises(ValueError, match="in the third step"):
            rank.check()


def test_a_report_reaches_other_groups_as_of_the_step_in_which_it_was() -> None:
    """Rank 0 of both has ended a step that failed elsewhere."""
    pipeline, replicas = ranks(2), ranks(2)
    pipeline[0].link(replicas[0])
    told = hearing(*replicas)
    for rank in (pipeline[0], replicas[0]):
        rank.end_step()
    pipeline[1].report(ValueError("in the first step"))
    wait(lambda: bool(told[1].reports))
    assert [ears.reports[0][2] for ears in told] == [0, 0]
    for rank in (pipeline[0], *replicas):
        with pytest.raises(ValueError, match="in the first step"):
            rank.check()


def test_ranks_meet_whatever_some_have_reported() -> None:
    a, b = ranks(2)
    with pytest.raises(ValueError), a.reporting():
        raise ValueError("before they meet")
    wait(lambda: not b.calm())
    for _ in range(2):
        calls = [lambda r=r: r.meet("here", 20.0, f"from {r.rank}") for r in (a, b)]
        assert together(calls) == [["from 0", "from 1"]] * 2
    # What was reported waits for the thread that it concerns.
    with pytest.raises(ValueError, match="before they meet"):
        b.check()


def test_nobody_waits_for_a_rank_that_is_lost() -> None:
    one, two = sockets_of(2)
    a, gone = map(one_of, (one, two))
    gone.announce("x", 1)
    assert a.take("x", 1) == 1
    # Not even in a step that it has ended.
    gone.end_step()
    end(two)
    with pytest.raises(TransportError, match="rank 1 is gone"):
        a.meet("here", 20.0)
    with pytest.raises(TransportError, match="rank 1 is gone"):
        a.read("sum", 1)


def test_a_linked_group_is_told_at_once_and_once() -> None:
    """A rank that waits in one group learns of what happens in another."""
    pipeline, replicas = ranks(2), ranks(2)
    pipeline[0].link(replicas[0])
    replicas[0].link(pipeline[0])
    waited, _ = together(
        [
            lambda: replicas[1].exchange("x", 1),
            lambda: pipeline[1].report(ValueError("bad batch")),
        ]
    )
    assert str(waited) == "bad batch (raised on rank 1)"
    for group in (pipeline[0], replicas[0]):
        wait(lambda group=group: not group.calm())
        with pytest.raises(ValueError, match="bad batch"):
            group.check()
    time.sleep(0.1)
    assert all(rank.calm() for rank in (*pipeline, *replicas))


def test_a_rank_that_is_needed_and_has_left_is_named() -> None:
    one, two, three = sockets_of(3)
    a, b, gone = map(one_of, (one, two, three))
    a.name_ranks({2: "stage 2"})
    gone.publish("address", "here")
    gone.announce("kind", 7)
    three.close(5.0)
    assert a.read("address", 2) == "here"
    assert a.take("kind", 2) == 7
    with pytest.raises(
        TransportError, match=r"^rank 2 \(stage 2\) is gone: it has left"
    ):
        a.take("kind", 2)
    # Others may go on without it.
    b.announce("x", 1)
    assert a.take("x", 1) == 1
    assert a.calm()


def test_a_rank_that_is_lost_is_a_failure_of_all_and_stays_one() -> None:
    one, two, three = sockets_of(3)
    a, b, gone = map(one_of, (one, two, three))
    gone.announce("x", 1)
    assert a.take("x", 2) == 1
    end(three)
    waited = together([lambda: a.exchange("x", 1), lambda: b.exchange("x", 1)])
    for error in waited:
        assert isinstance(error, TransportError)
        assert "rank 2 is gone: its connection is lost" in str(error)
    for rank in (a, b):
        with pytest.raises(TransportError, match="rank 2 is gone"):
            rank.check()


def test_ranks_that_leave_together_do_not_wait_for_each_other() -> None:
    """Each may hear the other's farewell before its own is written."""
    part = torch.zeros(1 << 20, dtype=torch.uint8)
    for _ in range(100):
        pair = sockets_of(2)
        for sockets in pair:
            sockets.on("data", lambda *frame: None)
            sockets.open()
        pair[0].send(1, "data", 0, [part])
        pair[1].send(0, "data", 1, [part])
        calls = [functools.partial(sockets.close, 3.0) for sockets in pair]
        assert together(calls) == [True, True]


ENDING = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))

import torch
from torch._C._distributed_c10d import HashStore
from torch_xla_pp.transport.sockets import Sockets

store, part = HashStore(), torch.zeros(1 << 12, dtype=torch.uint8)
pair = [Sockets(store, rank, 2) for rank in range(2)]
for rank, sockets in enumerate(pair):
    back = lambda peer, *_, own=sockets: own.send(peer, "data", 0, [part])
    sockets.on("data", back)
    sockets.open()
for _ in range(8):
    pair[0].send(1, "data", 0, [part])
"""


def test_no_thread_of_connections_outlives_the_interpreter() -> None:
    """One that is in C++ code then aborts the process, here in one of six runs."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "['MainThread']\n"), done.stderr
