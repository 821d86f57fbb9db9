"""Timelines as a trace, a picture and figures."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from strategies import timelines

from torch_xla_pp.schedule import zbv
from torch_xla_pp.simulate import Costs, Link, Network, simulate
from torch_xla_pp.timeline import (
    Span,
    Timeline,
    Transfer,
    merge,
    summarize,
    to_chrome,
    to_picture,
)

pytestmark = pytest.mark.pure


@pytest.fixture
def step() -> Timeline:
    """Two ranks of a V, with one message of each kind between each pair of stages."""
    costs = Costs.uniform(
        4, forward_s=0.004, input_s=0.002, weight_s=0.002, num_bytes=1 << 20
    )
    network = Network(default=Link(latency_s=0.001, bytes_per_s=1 << 30))
    return simulate(zbv(2, 4), costs, network)


def events_of(text: str) -> Iterator[dict[str, Any]]:
    yield from json.loads(text)["traceEvents"]


def test_a_trace_has_a_track_for_each_rank_and_one_colour_for_each_kind(
    step: Timeline,
) -> None:
    events = list(events_of(to_chrome(step)))
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {0: "rank 0", 1: "rank 1"}
    slices = [e for e in events if e["ph"] == "X" and e["name"] != "waiting"]
    assert len(slices) == len(step.spans)
    colours = {(e["cat"], e["cname"]) for e in slices}
    assert {kind for kind, _ in colours} == set("FIW")
    assert len(colours) == len({colour for _, colour in colours}) == 3
    first = slices[0]
    assert (first["name"], first["ts"], first["dur"]) == ("0F0", 0, 4000)
    assert first["args"] == {"stage": 0, "microbatch": 0}


def test_arrows_lead_from_the_action_that_sends_to_the_one_that_receives(
    step: Timeline,
) -> None:
    events = list(events_of(to_chrome(step)))

    def slice_at(arrow: dict[str, Any]) -> str:
        (found,) = [
            e["name"]
            for e in events
            if e["ph"] == "X" and e["tid"] == arrow["tid"] and e["name"] != "waiting"
            if e["ts"] <= arrow["ts"] < e["ts"] + e["dur"]
        ]
        return str(found)

    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    pairs = {(slice_at(starts[i]), slice_at(ends[i])) for i in starts}
    assert len(starts) == len(ends) == len(step.transfers) == len(pairs) == 16
    assert ("0F1", "1F1") in pairs
    assert ("3I0", "2I0") in pairs
    assert all(
        e["bp"] == "e" and e["args"] == {"bytes": 1 << 20} for e in ends.values()
    )


def test_an_arrow_leads_to_the_half_of_a_backward_that_waited_for_it() -> None:
    def span(kind: str, start_s: float, end_s: float) -> Span:
        return Span(
            rank=0, stage=0, kind=kind, microbatch=0, start_s=start_s, end_s=end_s
        )

    transfer = Transfer(
        sender_stage=1,
        sender_rank=1,
        receiver_stage=0,
        receiver_rank=0,
        kind="B",
        microbatch=0,
        sent_s=3,
        received_s=4,
        num_bytes=8,
    )
    for received in ("I", "W"):
        empty = span("IW"[received == "I"], 1, 1)
        spans = (empty, span(received, 2, 5))
        step = Timeline(num_ranks=2, spans=spans, transfers=(transfer,))
        (end,) = [e for e in events_of(to_chrome(step)) if e["ph"] == "f"]
        assert end["ts"] == 3e6


def test_several_timelines_are_beside_each_other(step: Timeline) -> None:
    text = to_chrome({"measured": step, "predicted": step})
    names = [e for e in events_of(text) if e["name"] == "process_name"]
    assert [(e["pid"], e["args"]["name"]) for e in names] == [
        (0, "measured"),
        (1, "predicted"),
    ]


@settings(max_examples=20)
@given(timeline=timelines())
def test_any_timeline_has_a_trace_and_a_summary(timeline: Timeline) -> None:
    events = list(events_of(to_chrome(timeline)))
    assert len([e for e in events if e["ph"] == "s"]) == len(timeline.transfers)
    assert len(str(summarize(timeline)).splitlines()) >= timeline.num_ranks + 2


def test_pictures_are_written_in_the_format_of_their_ending(
    step: Timeline, tmp_path: Path
) -> None:
    to_picture(step, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    to_picture(Timeline(num_ranks=1, spans=()), tmp_path / "none.svg")
    assert "<svg" in (tmp_path / "none.svg").read_text()
    with pytest.raises(ValueError, match="not supported"):
        to_picture(step, tmp_path / "step.txt")


def test_pictures_need_matplotlib(
    step: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="expected matplotlib, which draws"):
        to_picture(step, tmp_path / "step.png")


def test_a_summary_has_the_figures_of_ranks_and_edges() -> None:
    def span(rank: int, kind: str, start_s: float, end_s: float, **more: float) -> Span:
        return Span(
            rank=rank,
            stage=rank,
            kind=kind,
            microbatch=0,
            start_s=start_s,
            end_s=end_s,
            **more,
        )

    sent = Transfer(
        sender_stage=0,
        sender_rank=0,
        receiver_stage=1,
        receiver_rank=1,
        kind="F",
        microbatch=0,
        sent_s=2,
        received_s=2.5,
        num_bytes=3 << 10,
    )
    spans = (
        span(0, "F", 0, 2, dispatch_s=0.25),
        span(0, "B", 8, 10, dispatch_s=0.25),
        span(1, "F", 0, 8, waiting_s=3),
    )
    timeline = Timeline(
        num_ranks=2, spans=spans, transfers=(sent,), peak_bytes=(2 << 20, 0)
    )
    summary = summarize(timeline)
    assert (summary.busy_share, summary.bubble_share) == (0.45, 0.55)
    assert str(summary).splitlines() == [
        "step 10 s, 2 ranks, busy 45.0%, bubble 55.0%",
        "rank   busy  waiting   idle  dispatch  peak live    saved",
        "0     40.0%     0.0%  60.0%    500 ms          1  2.0 MiB",
        "1     50.0%    30.0%  20.0%         -          0      0 B",
        "",
        "sent      messages    bytes     each  mean time",
        "0 -> 1 F         1  3.0 KiB  3.0 KiB     500 ms",
    ]


def test_parts_of_a_step_are_merged(step: Timeline) -> None:
    parts = [
        Timeline(num_ranks=2, spans=step.of_rank(rank), transfers=step.transfers)
        for rank in range(2)
    ]
    assert merge(parts) == step
    with pytest.raises(ValueError, match="got 24 in several, such as 0F0 of rank 0"):
        merge([parts[0], step])
    with pytest.raises(ValueError, match="at least one timeline"):
        merge([])
