"""The light evaluation of a step takes as long as the simulated one."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import flows_along, legal_tables, stage_dags

from torch_xla_pp.errors import ScheduleError
from torch_xla_pp.schedule import Schedule, one_f_one_b, zb1p
from torch_xla_pp.simulate import (
    Costs,
    Link,
    Network,
    StepOrder,
    simulate,
    step_seconds,
)

pytestmark = pytest.mark.pure

FEW = settings(max_examples=50, deadline=None)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Costs, Network]:
    """Any legal schedule with costs and links of its own."""
    dag = draw(stage_dags())
    times = st.floats(0, 100)
    seconds = {(s, k): draw(times) for s in range(dag.num_stages) for k in "FBIW"}
    flows = draw(flows_along(dag.edges))
    pairs = [(a, b) for a in range(dag.num_ranks) for b in range(dag.num_ranks)]
    links = {
        pair: Link(latency_s=draw(times), bytes_per_s=draw(st.floats(0.1, 10)))
        for pair in pairs
        if pair[0] != pair[1]
    }
    costs = Costs(seconds=seconds, flows=flows)
    return draw(legal_tables(dag)), costs, Network(links=links)


@FEW
@given(case=cases())
def test_a_step_takes_as_long_as_its_timeline(
    case: tuple[Schedule, Costs, Network],
) -> None:
    schedule, costs, network = case
    timeline = simulate(schedule, costs, network)
    end_s = max((span.end_s for span in timeline.spans), default=0)
    found_s = step_seconds(schedule, costs, network)
    assert found_s == pytest.approx(end_s, rel=1e-9, abs=1e-12)
    order = StepOrder(schedule=schedule)
    assert step_seconds(order, costs, network) == found_s


def test_what_ranks_do_at_the_end_counts_for_each_rank() -> None:
    schedule, costs = one_f_one_b(2, 3), Costs.uniform(2)
    ends = [simulate(schedule, costs).of_rank(rank)[-1].end_s for rank in range(2)]
    late = replace(costs, final_s={0: 1.0, 1: 7.0})
    assert step_seconds(schedule, late) == max(ends[0] + 1, ends[1] + 7)


def test_a_rank_may_have_nothing_to_do_and_a_stage_no_action() -> None:
    (row,) = Schedule.from_csv("1F0,1B0\n").actions
    schedule = Schedule(actions=(row, ()))
    costs = Costs(seconds={(1, "F"): 2.0, (1, "B"): 3.0}, flows=())
    assert step_seconds(schedule, costs) == 5
    assert step_seconds(schedule, costs, limit_s=4.9) > 4.9


def test_what_is_passed_from_i_to_w_counts_as_memory() -> None:
    schedule = zb1p(2, 4)
    costs = Costs.uniform(2, saved_bytes=10)
    with_passed = replace(costs, passed_bytes={0: 13, 1: 13})
    assert simulate(schedule, costs).peak_bytes == (20, 20)
    # Rank 1 puts off its W by one microbatch, so that two have run I but no W.
    assert simulate(schedule, with_passed).peak_bytes == (23, 26)
    with_less = replace(costs, passed_bytes={0: 4, 1: 4})
    assert simulate(schedule, with_less).peak_bytes == (20, 14)


def test_a_schedule_that_stands_still_is_refused() -> None:
    standing = Schedule.from_csv("0B0,0F0\n1F0,1B0\n")
    with pytest.raises(ScheduleError, match="expected after 0F0"):
        step_seconds(standing, Costs.uniform(2))


def test_missing_times_are_refused() -> None:
    with pytest.raises(ValueError, match="expected the time of 1B, got none"):
        seconds = {(0, "F"): 1.0, (0, "B"): 1.0, (1, "F"): 1.0}
        step_seconds(one_f_one_b(2, 1), Costs(seconds=seconds, flows=()))  # type: ignore[arg-type]
