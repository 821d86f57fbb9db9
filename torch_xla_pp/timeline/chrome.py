"""Timelines as a trace file that Perfetto and Chrome's about:tracing open.

A timeline is a process of the trace, a rank is a track of it. Waiting is a slice
inside that of the action. Arrows lead from the action that sends to the one that
receives. Chrome colours slices by `cname`; Perfetto by the name without its digits,
which is the kind as well.

Source: "Trace Event Format", Google, 2016.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_xla_pp.timeline.span import Span, Transfer
from torch_xla_pp.timeline.timeline import Timeline

_COLOURS = {
    "F": "rail_response",
    "B": "rail_load",
    "I": "rail_animation",
    "W": "rail_idle",
}
_WAITING_COLOUR = "grey"
# Kind of message → kinds of actions. A first stage may have nothing to do in I, and
# receives in W.
_SENDERS = {"F": "F", "B": "BI"}
_RECEIVERS = {"F": "F", "B": "BIW"}
# Arrows must end inside slices: this much before the end of one.
_INSIDE_S = 1e-9

_Event = dict[str, Any]


def to_chrome(
    timelines: Timeline | Mapping[str, Timeline], path: str | Path | None = None
) -> str:
    """Return a trace with one process for each timeline, all of them beginning at 0.

    Args:
        timelines: One timeline, or name → timeline, e.g. of a measured and a predicted
            step.
        path: A file to write as well.
    """
    named = {"step": timelines} if isinstance(timelines, Timeline) else timelines
    events = [
        event
        for number, (name, timeline) in enumerate(named.items())
        for event in _events(number, name, timeline)
    ]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    if path is not None:
        Path(path).write_text(text)
    return text


def _events(number: int, name: str, timeline: Timeline) -> Iterator[_Event]:
    yield _metadata("process_name", number, 0, name)
    for rank in range(timeline.num_ranks):
        yield _metadata("thread_name", number, rank, f"rank {rank}")
    spans: dict[tuple[int, str, int], Span] = {}
    for span in timeline.spans:
        spans[span.stage, span.kind, span.microbatch] = span
        for event in _slices(span, timeline.start_s):
            yield {**event, "pid": number, "tid": span.rank}
    for arrow, transfer in enumerate(timeline.transfers):
        for event in _arrow(transfer, spans, timeline.start_s):
            yield {**event, "pid": number, "id": f"{number}.{arrow}"}


def _metadata(what: str, number: int, rank: int, name: str) -> _Event:
    return {"ph": "M", "name": what, "pid": number, "tid": rank, "args": {"name": name}}


def _slices(span: Span, zero_s: float) -> Iterator[_Event]:
    start = _microseconds(span.start_s - zero_s)
    facts: _Event = {"stage": span.stage, "microbatch": span.microbatch}
    if span.dispatch_s is not None:
        facts["dispatch_us"] = _microseconds(span.dispatch_s)
    yield {
        "ph": "X",
        "name": str(span),
        "cat": span.kind,
        "ts": start,
        "dur": _microseconds(span.duration_s),
        "cname": _COLOURS.get(span.kind, "generic_work"),
        "args": facts,
    }
    if span.waiting_s > 0:
        yield {
            "ph": "X",
            "name": "waiting",
            "cat": "waiting",
            "ts": start,
            "dur": _microseconds(span.waiting_s),
            "cname": _WAITING_COLOUR,
        }


def _arrow(
    transfer: Transfer, spans: Mapping[tuple[int, str, int], Span], zero_s: float
) -> Iterator[_Event]:
    t = transfer
    ends = (
        ("s", _SENDERS, t.sender_stage, t.sender_rank, t.sent_s),
        ("f", _RECEIVERS, t.receiver_stage, t.receiver_rank, t.received_s),
    )
    for phase, users, stage, rank, noted_s in ends:
        kinds = users.get(t.kind, "")
        found = [spans.get((stage, kind, t.microbatch)) for kind in kinds]
        time_s = _nearest([span for span in found if span is not None], noted_s)
        event = {
            "ph": phase,
            "name": str(transfer),
            "cat": "message",
            "ts": _microseconds(time_s - zero_s),
            "tid": rank,
            "args": {"bytes": transfer.num_bytes},
        }
        yield event if phase == "s" else {**event, "bp": "e"}


def _nearest(spans: Sequence[Span], time_s: float) -> float:
    """Return the time within any of the spans that is nearest to a time."""
    times_s = [max(s.start_s, min(time_s, s.end_s - _INSIDE_S)) for s in spans]
    return min(times_s, key=lambda found_s: abs(found_s - time_s), default=time_s)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
