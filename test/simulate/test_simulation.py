"""Simulated steps keep the order, the data's dependencies and the costs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import StageDag, flows_along, legal_tables, needs_of, stage_dags

from torch_xla_pp.errors import ScheduleError
from torch_xla_pp.schedule import Action, Schedule
from torch_xla_pp.simulate import Costs, Flow, Link, Network, simulate, step_seconds
from torch_xla_pp.timeline import Timeline

pytestmark = pytest.mark.pure

FEW = settings(max_examples=30, deadline=None)
CHAIN = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Costs, Network]:
    """Any legal schedule of any graph, with any costs and links."""
    dag = draw(stage_dags())
    schedule = draw(legal_tables(dag))
    times = st.floats(0, 100)
    keys = [(stage, kind) for stage in range(dag.num_stages) for kind in "FBIW"]
    flows = draw(flows_along(dag.edges))
    seconds = {key: draw(times) for key in keys}
    link = Link(latency_s=draw(times), bytes_per_s=draw(st.floats(0.1, 10)))
    return schedule, Costs(seconds=seconds, flows=flows), Network(default=link)


@FEW
@given(case=cases())
def test_every_action_runs_in_order_and_for_its_time(
    case: tuple[Schedule, Costs, Network],
) -> None:
    schedule, costs, network = case
    timeline = simulate(schedule, costs, network)
    for rank, row in enumerate(schedule.actions):
        spans = timeline.of_rank(rank)
        assert [str(span) for span in spans] == [str(action) for action in row]
        for span, action in zip(spans, row, strict=True):
            took = costs.seconds[action.stage, action.kind]
            assert span.busy_s == pytest.approx(took, abs=1e-6)
        assert all(a.end_s == b.start_s for a, b in zip(spans, spans[1:], strict=False))


@FEW
@given(case=cases())
def test_a_step_is_as_long_as_it_must_be(
    case: tuple[Schedule, Costs, Network],
) -> None:
    """It takes the longest path through orders and dependencies, and no more."""
    schedule, costs, network = case
    step_s = simulate(schedule, costs, Network()).step_s
    assert simulate(schedule, costs, network).step_s >= step_s
    flows = [replace(flow, made_at=1.0, graded_at=()) for flow in costs.flows]
    at_ends = replace(costs, flows=tuple(flows))
    end_s = simulate(schedule, at_ends, Network()).step_s
    assert end_s == pytest.approx(longest_path(schedule, costs))
    assert end_s >= step_s - 1e-9


@FEW
@given(case=cases(), data=st.data())
def test_nothing_gets_faster_when_something_takes_longer(
    case: tuple[Schedule, Costs, Network], data: st.DataObject
) -> None:
    schedule, costs, network = case
    key = data.draw(st.sampled_from(sorted(costs.seconds)))
    slower = {**costs.seconds, key: costs.seconds[key] + data.draw(st.floats(0, 9))}
    before = ends_of(simulate(schedule, costs, network))
    after = ends_of(simulate(schedule, replace(costs, seconds=slower), network))
    assert all(after[name] >= end_s for name, end_s in before.items())


def longest_path(schedule: Schedule, costs: Costs) -> float:
    """Find when the last action ends, relaxing all times until nothing changes."""
    whole = {(a.stage, a.microbatch): False for row in schedule.actions for a in row}
    whole |= {
        (a.stage, a.microbatch): True
        for row in schedule.actions
        for a in row
        if a.kind == "B"
    }
    dag = StageDag(
        edges=costs.edges,
        placement=schedule.placement,
        num_microbatches=schedule.num_microbatches,
    )
    needs = needs_of(dag, whole)
    for row in schedule.actions:
        for before, after in zip(row, row[1:], strict=False):
            needs[after].add(before)
    ends: dict[Action, float] = {}
    while len(ends) < len(needs):
        for action in needs.keys() - ends.keys():
            if needs[action] <= ends.keys():
                start_s = max((ends[other] for other in needs[action]), default=0.0)
                ends[action] = start_s + costs.seconds[action.stage, action.kind]
    return max(ends.values())


def ends_of(timeline: Timeline) -> dict[str, float]:
    return {str(span): span.end_s for span in timeline.spans}


def test_messages_take_latency_and_bandwidth() -> None:
    costs = Costs.uniform(2, num_bytes=10)
    link = Link(latency_s=5, bytes_per_s=2)
    timeline = simulate(CHAIN, costs, Network(default=link))
    sent = {str(t): (t.sent_s, t.received_s, t.num_bytes) for t in timeline.transfers}
    # Two follow each other on the link: the second one is on it from 6 to 11.
    assert sent["0->1 F0"] == (1, 11, 10)
    assert sent["0->1 F1"] == (2, 16, 10)
    assert timeline.of_rank(1)[0].waiting_s == 11


def test_messages_leave_when_they_are_there() -> None:
    flow = Flow(producer=0, consumers=(1,), made_at=0.25, graded_at=(0.5,))
    costs = replace(Costs.uniform(2, forward_s=4), flows=(flow,))
    timeline = simulate(CHAIN, costs)
    sent = {str(transfer): transfer.sent_s for transfer in timeline.transfers}
    # B takes 2 s, and rank 1 runs 1F0 from 1 to 5, 1B0 to 7, 1F1 to 11, 1B1 to 13.
    assert sent == {"0->1 F0": 1, "0->1 F1": 5, "1->0 B0": 6, "1->0 B1": 12}
    starts = [span.end_s - span.busy_s for span in timeline.of_rank(0)]
    assert starts == [0, 4, 8, 12]
    assert timeline.step_s == step_seconds(CHAIN, costs) == 14


def test_values_that_go_together_leave_with_the_last() -> None:
    early = Flow(producer=0, consumers=(1,), num_bytes=3, made_at=0.0, graded_at=(0.0,))
    costs = Costs.uniform(2)
    costs = replace(costs, flows=(early, replace(early, made_at=0.5, graded_at=())))
    first, *_, last = simulate(CHAIN, costs).transfers
    assert (first.sent_s, first.num_bytes) == (0.5, 6)
    assert last.sent_s == simulate(CHAIN, costs).of_rank(1)[-1].end_s


def test_each_link_may_differ() -> None:
    costs = Costs.uniform(2)
    network = Network(links={(1, 0): Link(latency_s=7)})
    times = {
        t.kind: t.received_s - t.sent_s
        for t in simulate(CHAIN, costs, network).transfers
    }
    assert times == {"F": 0, "B": 7}


def test_values_go_to_a_rank_once_and_gradients_come_back_from_each_stage() -> None:
    schedule = Schedule.from_csv("0F0,0B0\n1F0,2F0,2B0,1B0\n")
    flow = Flow(producer=0, consumers=(1, 2), num_bytes=8)
    costs = replace(Costs.uniform(3), flows=(flow,))
    sent = [str(transfer) for transfer in simulate(schedule, costs).transfers]
    assert sent == ["0->1 F0", "2->0 B0", "1->0 B0"]
    without = replace(costs, flows=(replace(flow, has_gradient=False),))
    assert [str(t) for t in simulate(schedule, without).transfers] == ["0->1 F0"]


def test_a_step_without_backwards_keeps_nothing() -> None:
    schedule = Schedule.from_csv("0F0,0F1\n1F0,1F1\n")
    timeline = simulate(schedule, Costs.uniform(2, saved_bytes=4))
    assert (timeline.step_s, timeline.peak_bytes) == (3, (0, 0))


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ("0F0,0B0\n1B0,1F0\n", "1B0: expected after 1F0"),
        ("0B0,0F0\n1F0,1B0\n", "0B0: expected after 0F0"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "0F0: expected once, got 2 times"),
        ("0F0\n1F0,1B0,0B0\n", "expected stage 0 on rank 0, got it on rank 1"),
        ("0F0,0B0\n1F0\n", "stage 1, microbatch 0: expected F and B"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(table: str, fault: str) -> None:
    with pytest.raises(ScheduleError, match=fault):
        simulate(Schedule.from_csv(table), Costs.uniform(2))


def test_costs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="time of every action, got none for 2F, 2I"):
        split = Schedule.from_csv("0F0,0I0,0W0\n2F0,2I0,2W0\n")
        simulate(split, replace(Costs.uniform(2), flows=()))
    with pytest.raises(ValueError, match="flows lead to, got none of stages 4, 5"):
        flow = Flow(producer=4, consumers=(5,))
        simulate(CHAIN, replace(Costs.uniform(2), flows=(flow,)))
    with pytest.raises(ValueError, match="at least 0 s, got 0F: -1"):
        Costs(seconds={(0, "F"): -1}, flows=())
    with pytest.raises(ValueError, match="flow from stage 0: expected a size"):
        Flow(producer=0, consumers=(1,), num_bytes=-1)
    with pytest.raises(ValueError, match="parts of actions from 0 to 1, got 1.5"):
        Flow(producer=0, consumers=(1,), made_at=1.5)
    with pytest.raises(ValueError, match="a part for each of 2 consumers, got 1"):
        Flow(producer=0, consumers=(1, 2), graded_at=(0.5,))
    with pytest.raises(ValueError, match="link: expected a latency of at least 0"):
        Link(bytes_per_s=0)
