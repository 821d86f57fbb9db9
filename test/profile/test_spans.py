"""What is noted of a step becomes the spans and transfers of its timeline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_xla_pp.profile.recorder import Dispatch
from torch_xla_pp.profile.spans import Notes, spans_of, transfers_of
from torch_xla_pp.schedule import Action
from torch_xla_pp.timeline import Span
from torch_xla_pp.transport import Event, Message, Record

pytestmark = pytest.mark.pure

MS = 1_000_000


def noted(*notes: tuple[str, int, str]) -> list[Record]:
    """Read e.g. `("began", 3, "1F0")`, at 3 ms; messages are "1F0<0", from stage 0."""
    records = []
    for event, time_ms, name in notes:
        action, _, origin = name.partition("<")
        kind = next(c for c in action if c.isalpha())
        stage, microbatch = map(int, action.split(kind))
        records.append(
            Record(
                Event[event.upper()],
                time_ms * MS,
                kind,
                stage,
                microbatch,
                int(origin or -1),
                10 * (event == "sent"),
            )
        )
    return records


def spans(returned: dict[str, int], records: list[Record]) -> dict[str, str]:
    """Return each action's times in ms, e.g. "3..9, waits 2"."""
    dispatched = {
        Action.from_text(name): Dispatch(returned_ns=time * MS, cpu_ns=MS // 2)
        for name, time in returned.items()
    }
    found = spans_of(0, dispatched, records, 1000 * MS)
    assert all(span.dispatch_s == pytest.approx(0.0005) for span in found)
    return {str(span): _text(span) for span in found}


def _text(span: Span) -> str:
    start, end = span.start_s * 1000 - 1000, span.end_s * 1000 - 1000
    waits = f", waits {span.waiting_s * 1000:.0f}" if span.waiting_s else ""
    return f"{start:.0f}..{end:.0f}{waits}"


def test_an_action_begins_when_it_is_enqueued_and_the_one_before_has_ended() -> None:
    """XLA may run the note of a beginning late."""
    records = noted(
        ("began", 5, "0F0"), ("ended", 9, "0F0"), ("began", 30, "0F1"),
        ("ended", 40, "0F1"), ("began", 52, "0F2"), ("ended", 60, "0F2"),
    )  # fmt: skip
    assert spans({"0F0": 6, "0F1": 7, "0F2": 51}, records) == {
        "0F0": "5..9",
        "0F1": "9..40",
        "0F2": "51..60",
    }


def test_devices_make_one_span_from_first_to_last() -> None:
    records = noted(
        ("began", 2, "0F0"), ("began", 3, "0F0"), ("ended", 8, "0F0"),
        ("began", 8, "0B0"), ("ended", 9, "0F0"), ("ended", 14, "0B0"),
        ("ended", 15, "0B0"), ("began", 10, "0B0"),
    )  # fmt: skip
    assert spans({"0F0": 4, "0B0": 5}, records) == {"0F0": "2..9", "0B0": "9..15"}


def test_waiting_is_from_the_last_request_to_the_last_part() -> None:
    records = noted(
        ("asked", 2, "2F0<1"), ("asked", 3, "2F0<1"), ("began", 3, "2F0"),
        ("arrived", 5, "2F0<1"), ("arrived", 7, "2F0<1"),
        ("asked", 6, "2F0<0"), ("arrived", 10, "2F0<0"), ("ended", 20, "2F0"),
        ("arrived", 1, "2B0<3"), ("asked", 21, "2B0<3"), ("ended", 30, "2B0"),
    )  # fmt: skip
    assert spans({"2F0": 4, "2B0": 4}, records) == {
        "2F0": "2..20, waits 7",
        "2B0": "20..30",
    }


def test_an_action_without_a_program_takes_no_time_and_receives_nothing() -> None:
    """On the first stage the backward of weights receives."""
    records = noted(
        ("began", 1, "0F0"), ("ended", 5, "0F0"), ("asked", 6, "0B0<1"),
        ("arrived", 8, "0B0<1"), ("ended", 12, "0W0"),
    )  # fmt: skip
    assert spans({"0F0": 2, "0I0": 3, "0W0": 4}, records) == {
        "0F0": "1..5",
        "0I0": "5..5",
        "0W0": "5..12, waits 2",
    }


@given(st.lists(st.tuples(*[st.integers(0, 50)] * 4), min_size=1, max_size=6))
def test_spans_never_overlap_and_wait_within_themselves(
    times: list[tuple[int, int, int, int]],
) -> None:
    names = [f"1F{i}" for i in range(len(times))]
    records, returned = [], {}
    for name, (began, ended, asked, arrived) in zip(names, times, strict=True):
        returned[name] = began
        records += noted(
            ("began", began, name), ("ended", ended, name),
            ("asked", asked, f"{name}<0"), ("arrived", arrived, f"{name}<0"),
        )  # fmt: skip
    dispatched = {
        Action.from_text(name): Dispatch(returned_ns=time * MS, cpu_ns=0)
        for name, time in returned.items()
    }
    found = spans_of(0, dispatched, records, 0)
    assert [str(span) for span in found] == names
    for before, after in zip(found, found[1:], strict=False):
        assert before.end_s <= after.start_s


def test_a_transfer_joins_what_both_sides_noted() -> None:
    message = Message("B", 0, 3, 1)
    sender = Notes((), {message: (2.0, 80)}, {}, 0)
    receiver = Notes((), {}, {message: 2.5}, 0)
    (transfer,) = transfers_of([receiver, sender])
    assert str(transfer) == "1->0 B3"
    assert (transfer.sender_rank, transfer.receiver_rank) == (1, 0)
    assert (transfer.sent_s, transfer.received_s) == (2.0, 2.5)
    assert transfer.num_bytes == 80
