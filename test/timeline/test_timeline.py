"""A timeline is a checked value that JSON keeps."""

from pathlib import Path

import pytest
from hypothesis import given
from strategies import timelines

from torch_xla_pp.timeline import Span, Timeline, Transfer

pytestmark = pytest.mark.pure


def span(
    text: str, start_s: float, end_s: float, *, rank: int = 0, waiting_s: float = 0.0
) -> Span:
    """Make a span of an action with one-digit stage and microbatch."""
    return Span(
        rank=rank,
        stage=int(text[0]),
        kind=text[1],
        microbatch=int(text[2]),
        start_s=start_s,
        end_s=end_s,
        waiting_s=waiting_s,
    )


@given(timeline=timelines())
def test_json_keeps_all(timeline: Timeline) -> None:
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_a_file_keeps_all(tmp_path: Path) -> None:
    timeline = Timeline(num_ranks=1, spans=(span("0F0", 0, 1),))
    timeline.to_json(tmp_path / "step.json")
    assert Timeline.from_json(tmp_path / "step.json") == timeline


def test_spans_are_kept_in_order_of_rank_and_time() -> None:
    late, early, other = span("0B0", 3, 5), span("0F0", 1, 2), span("1F0", 0, 9, rank=1)
    timeline = Timeline(num_ranks=2, spans=(other, late, early))
    assert timeline.spans == (early, late, other)
    assert timeline.of_rank(0) == (early, late)
    assert timeline.step_s == 9
    assert Timeline(num_ranks=1, spans=()).step_s == 0


def test_waiting_is_no_work() -> None:
    found = span("1F0", 1, 4, waiting_s=1)
    assert (str(found), found.duration_s, found.busy_s) == ("1F0", 3, 2)


def test_faulty_values_are_refused() -> None:
    with pytest.raises(ValueError, match="span 0F0 of rank 0: expected an end after"):
        span("0F0", 2, 1)
    with pytest.raises(ValueError, match="got 0 to 1 s with 2 s of waiting"):
        span("0F0", 0, 1, waiting_s=2)
    with pytest.raises(ValueError, match=r"ranks 0\.\.0, got ranks \[3\]"):
        Timeline(num_ranks=1, spans=(span("0F0", 0, 1, rank=3),))
    with pytest.raises(ValueError, match="peak_bytes of all 2 ranks or none, got 1"):
        Timeline(num_ranks=2, spans=(), peak_bytes=(1,))
    with pytest.raises(ValueError, match="transfer 0->1 F2: expected a size"):
        Transfer(
            sender_stage=0,
            sender_rank=0,
            receiver_stage=1,
            receiver_rank=1,
            kind="F",
            microbatch=2,
            sent_s=0,
            received_s=1,
            num_bytes=-1,
        )


@pytest.mark.parametrize("text", ["{", "{}", '{"format": "other"}', "{1: []}"])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected JSON of format 'torch_xla_pp time"):
        Timeline.from_json(text)
