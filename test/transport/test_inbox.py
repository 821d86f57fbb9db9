"""Messages wait for their receives, and receives for their messages."""

import pytest
import torch

from torch_xla_pp.transport.inbox import Inbox, Parcel

pytestmark = pytest.mark.pure


def parcel(name: str) -> Parcel:
    return Parcel(name, [torch.zeros(1, dtype=torch.uint8)])


def header(inbox: Inbox, ticket: object) -> object:
    found = inbox.take(ticket)  # type: ignore[arg-type]
    return found and found.header


def test_the_nth_receive_gets_the_nth_message_whichever_is_first() -> None:
    inbox = Inbox()
    first = inbox.expect(0, 1, ("tag", 5))
    inbox.deliver(0, 1, ("tag", 5), parcel("a"))
    inbox.deliver(0, 1, ("tag", 5), parcel("b"))
    second = inbox.expect(0, 1, ("tag", 5))
    assert header(inbox, second) == "b"
    assert header(inbox, first) == "a"


def test_sources_and_keys_are_kept_apart() -> None:
    inbox = Inbox()
    inbox.deliver(0, 1, ("tag", 5), parcel("a"))
    assert not inbox.has(inbox.expect(0, 2, ("tag", 5)))
    assert not inbox.has(inbox.expect(0, 1, ("tag", 6)))
    assert inbox.has(inbox.expect(0, 1, ("tag", 5)))


def test_leftovers_of_a_failed_step_are_dropped() -> None:
    inbox = Inbox()
    inbox.deliver(0, 1, ("x",), parcel("before the failure"))
    ticket = inbox.expect(1, 1, ("x",))
    inbox.deliver(0, 1, ("x",), parcel("late"))
    inbox.deliver(1, 1, ("x",), parcel("next step"))
    assert header(inbox, ticket) == "next step"


def test_a_message_of_a_rank_that_is_ahead_is_kept() -> None:
    inbox = Inbox()
    inbox.deliver(1, 1, ("x",), parcel("next step"))
    assert not inbox.has(inbox.expect(0, 1, ("x",)))
    assert inbox.has(inbox.expect(1, 1, ("x",)))


def test_what_arrived_can_be_taken_after_the_source_has_left() -> None:
    inbox = Inbox()
    inbox.deliver(0, 1, ("x",), parcel("last"))
    inbox.close(1, "it has left")
    inbox.close(1, "a later reason")
    assert header(inbox, inbox.expect(0, 1, ("x",))) == "last"
    assert inbox.wait(inbox.expect(0, 1, ("x",)), limit_s=60.0)
    assert inbox.closed(1) == "it has left"
