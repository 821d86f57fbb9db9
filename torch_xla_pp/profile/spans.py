"""From the notes of a rank in a step to the spans of its timeline.

Laws, for the programs of a rank:

* They run one after another. An action begins when the one before it has ended, but
  not before it was enqueued: when the call that enqueued it returned, or at the first
  note of the action if that is earlier.
* It ends when the last device has noted its end.
* It waits for a message from when the last device has asked for it until the last
  part has arrived.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch_xla_pp.native import Event, Note
from torch_xla_pp.profile.recorder import Dispatch
from torch_xla_pp.schedule import Action
from torch_xla_pp.timeline import Span, Transfer
from torch_xla_pp.transport import Message

_NS = 1e-9
_Interval = tuple[int, int]
_Name = tuple[str, int, int]


class Notes(NamedTuple):
    """The notes of one rank, on the clock of rank 0.

    Attributes:
        spans: The actions that it ran.
        sent: Message → when it was sent, and its bytes.
        arrived: Message → when it had arrived.
        peak_bytes: The most that was saved for backwards.
    """

    spans: tuple[Span, ...]
    sent: Mapping[Message, tuple[float, int]]
    arrived: Mapping[Message, float]
    peak_bytes: int


def spans_of(
    rank: int,
    dispatched: Mapping[Action, Dispatch],
    records: Sequence[Note],
    offset_ns: int,
) -> tuple[Span, ...]:
    """Return the spans of a rank.

    Args:
        rank: The rank.
        dispatched: Its actions, in their order.
        records: The notes.
        offset_ns: What to add to its clock.
    """
    marks = _Marks(records)
    arrived = latest_times(records, Event.ARRIVED)
    ended_ns, spans = 0, []
    for action, cost in dispatched.items():
        noted = marks.take(action)
        start_ns = max(ended_ns, min([cost.returned_ns, *noted.times]))
        ended_ns = max([start_ns, *noted.ends])
        waits = [(asked, arrived[m]) for m, asked in noted.asked.items()]
        waited_ns = _covered(waits, start_ns, ended_ns)
        start_s = (start_ns + offset_ns) * _NS
        end_s = (ended_ns + offset_ns) * _NS
        spans.append(
            Span(
                rank=rank,
                stage=action.stage,
                kind=action.kind,
                microbatch=action.microbatch,
                start_s=start_s,
                end_s=end_s,
                waiting_s=min(waited_ns * _NS, end_s - start_s),
                dispatch_s=cost.cpu_ns * _NS,
            )
        )
    return tuple(spans)


def transfers_of(notes: Sequence[Notes]) -> tuple[Transfer, ...]:
    """Join the notes of senders and receivers, given by rank."""
    receivers = {message: rank for rank, n in enumerate(notes) for message in n.arrived}
    return tuple(
        Transfer(
            sender_stage=message.origin,
            sender_rank=rank,
            receiver_stage=message.stage,
            receiver_rank=receivers[message],
            kind=message.direction,
            microbatch=message.microbatch,
            sent_s=sent_s,
            received_s=notes[receivers[message]].arrived[message],
            num_bytes=num_bytes,
        )
        for rank, own in enumerate(notes)
        for message, (sent_s, num_bytes) in own.sent.items()
        if message in receivers
    )


def latest_times(records: Iterable[Note], event: Event) -> dict[Message, int]:
    """Return when an event of each message happened on the last device."""
    found: dict[Message, int] = {}
    for record in records:
        if record.event is event:
            message = message_of(record)
            found[message] = max(found.get(message, 0), record.time_ns)
    return found


def message_of(record: Note) -> Message:
    """Return the message that a note is about."""
    return Message(record.kind, record.stage, record.microbatch, record.origin)  # type: ignore[arg-type]


class _Noted(NamedTuple):
    """The notes of one action.

    Attributes:
        times: The times of its events.
        ends: The times at which a device had ended one of its programs.
        asked: Message → when the last device had asked for it.
    """

    times: list[int]
    ends: list[int]
    asked: dict[Message, int]


class _Marks:
    """The notes of actions, which are taken in the order of the actions."""

    def __init__(self, records: Sequence[Note]) -> None:
        self._begins: dict[_Name, list[int]] = {}
        self._ends: dict[_Name, list[int]] = {}
        self._asks: dict[tuple[bool, int, int], dict[Message, list[int]]] = {}
        for record in records:
            if record.event is Event.ASKED and record.kind != "S":
                place = (record.kind == "F", record.stage, record.microbatch)
                asks = self._asks.setdefault(place, {})
                asks.setdefault(message_of(record), []).append(record.time_ns)
            times = {Event.BEGAN: self._begins, Event.ENDED: self._ends}
            if record.event in times:
                name = (record.kind, record.stage, record.microbatch)
                times[record.event].setdefault(name, []).append(record.time_ns)

    def take(self, action: Action) -> _Noted:
        """Return the notes of an action.

        The notes do not show which of the backward actions of a microbatch receives: it
        is the first that ends after asking.
        """
        name = (action.kind, action.stage, action.microbatch)
        ends = self._ends.get(name, [])
        left = self._asks.get((action.kind == "F", *name[1:]), {})
        own = [m for m, asked in left.items() if max(asked) <= max(ends, default=0)]
        asks = {message: left.pop(message) for message in own}
        times = [*self._begins.get(name, []), *(t for a in asks.values() for t in a)]
        return _Noted(times, ends, {m: max(asked) for m, asked in asks.items()})


def _covered(waits: Iterable[_Interval], start: int, end: int) -> int:
    """Return how much of the time from `start` to `end` is in any of `waits`."""
    total, done = 0, start
    for first, last in sorted(waits):
        begin, stop = max(first, done), min(last, end)
        if stop > begin:
            total += stop - begin
            done = stop
    return total
