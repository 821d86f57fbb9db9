"""Without waiting for messages, bubbles are exactly those that the papers state.

Times are whole numbers, so that sums of them are exact. F, I and W stand for what an
action of a stage takes, p for ranks, m for microbatches, v for stages of a rank.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_xla_pp.schedule import (
    Schedule,
    dualpipev,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zb1p,
    zbv,
)
from torch_xla_pp.simulate import Costs, simulate
from torch_xla_pp.timeline import summarize

pytestmark = pytest.mark.pure

FEW = settings(max_examples=30, deadline=None)
RANKS = st.integers(1, 6)
TIMES = st.tuples(*[st.integers(1, 9)] * 3)
Times = tuple[int, int, int]


def bubble_of(schedule: Schedule, times: Times) -> float:
    """Return the time without work, which is the same on all ranks."""
    forward_s, input_s, weight_s = times
    costs = Costs.uniform(
        schedule.num_stages, forward_s=forward_s, input_s=input_s, weight_s=weight_s
    )
    summary = summarize(simulate(schedule, costs))
    bubbles = {rank.waiting_s + rank.idle_s for rank in summary.ranks}
    assert len(bubbles) == 1
    return bubbles.pop()


@FEW
@given(p=RANKS, m=st.integers(1, 12), times=TIMES)
def test_gpipe_and_1f1b(p: int, m: int, times: Times) -> None:
    """Huang et al. 2019, section 2.2; Narayanan et al. 2021, section 2.1."""
    for schedule in (gpipe(p, m), one_f_one_b(p, m)):
        assert bubble_of(schedule, times) == (p - 1) * sum(times)


@FEW
@given(p=RANKS, m=st.integers(1, 12))
def test_gpipe_with_unit_costs(p: int, m: int) -> None:
    """Huang et al. 2019: the bubble's share is (p - 1) / (m + p - 1)."""
    costs = Costs.uniform(p, input_s=0.5, weight_s=0.5)
    share = summarize(simulate(gpipe(p, m), costs)).bubble_share
    assert share == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@FEW
@given(p=RANKS, rounds=st.integers(1, 3), v=st.integers(1, 3), times=TIMES)
def test_interleaved_1f1b(p: int, rounds: int, v: int, times: Times) -> None:
    """Narayanan et al. 2021, section 2.2: as if a stage's part were the whole rank's.

    The bubble is (p - 1) times one of v parts, so that its ratio to the work is
    (p - 1) / (v m).
    """
    bubble = bubble_of(interleaved_1f1b(p, p * rounds, v), times)
    assert bubble == (p - 1) * sum(times)


@FEW
@given(p=RANKS, rounds=st.integers(1, 3), times=TIMES)
def test_zb1p(p: int, rounds: int, times: Times) -> None:
    """Qi et al. 2024, section 2.2: (p - 1)(F + I - W), if nothing is shorter than W."""
    forward, backward, weight = times
    bubble = bubble_of(zb1p(p, p * rounds), times)
    assert bubble == (p - 1) * (forward + backward - min(times))
    if min(times) == weight:
        assert bubble == (p - 1) * (forward + backward - weight)


@FEW
@given(p=RANKS, extra=st.integers(0, 8), unit=st.integers(1, 9))
def test_zbv_has_no_bubble(p: int, extra: int, unit: int) -> None:
    """Qi et al. 2024, section 6: no rank pauses between its first and last action."""
    schedule = zbv(p, 2 * p - 1 + extra)
    costs = Costs.uniform(2 * p, forward_s=unit, input_s=unit, weight_s=unit)
    timeline = simulate(schedule, costs)
    for rank in range(p):
        first, *others = timeline.of_rank(rank)
        assert first.start_s + first.waiting_s == rank * unit
        assert all(span.waiting_s == 0 for span in others)


@FEW
@given(p=RANKS, extra=st.integers(0, 8), unit=st.integers(1, 9))
def test_dualpipev(p: int, extra: int, unit: int) -> None:
    """DeepSeek-AI 2024 state (p - 1)(F&B + B - 3W) for F&B as one program.

    Here the F of such a pair sends before the B begins, which saves (p - 1) I.
    """
    forward = backward = weight = unit
    both = forward + backward + weight
    paper = (p - 1) * (both + backward + weight - 3 * weight)
    bubble = bubble_of(dualpipev(p, 2 * p + extra), (forward, backward, weight))
    assert bubble == paper - (p - 1) * backward


@FEW
@given(p=RANKS, m=st.integers(1, 12))
def test_live_microbatches(p: int, m: int) -> None:
    """GPipe keeps all, 1F1B one for each later rank and itself."""
    costs = Costs.uniform(p, saved_bytes=3)
    for schedule, bound in ((gpipe(p, m), m), (one_f_one_b(p, m), p)):
        timeline = simulate(schedule, costs)
        ranks = summarize(timeline).ranks
        assert ranks[0].peak_live == min(m, bound)
        assert timeline.peak_bytes == tuple(3 * rank.peak_live for rank in ranks)
    assert summarize(timeline).ranks[-1].peak_live == 1
