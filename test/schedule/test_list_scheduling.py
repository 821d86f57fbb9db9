"""Orders from a simulation: in unit time, with real times, and in bounded memory."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import StageDag, stage_dags

from torch_xla_pp.schedule import (
    Action,
    Schedule,
    chain_of,
    dag_1f1b,
    list_schedule,
    verify,
)
from torch_xla_pp.simulate import Costs, step_seconds

pytestmark = pytest.mark.pure

TIMES = st.sampled_from([0.0, 0.25, 1.0, 1.5, 3.0])


def in_rounds(dag: StageDag) -> Schedule:
    """Let all ranks choose at once, round by round, as if all took one unit."""
    depths = [1] * dag.num_stages
    for producer, consumer in sorted(dag.edges, reverse=True):
        depths[producer] = max(depths[producer], 1 + depths[consumer])
    befores = [*dag.edges, *dag.carriers]
    done = {kind: [0] * dag.num_stages for kind in "FB"}
    rows: list[list[Action]] = [[] for _ in range(dag.num_ranks)]
    while min(done["B"]) < dag.num_microbatches:
        chosen = []
        for rank in range(dag.num_ranks):
            options = []
            for stage in (s for s, r in dag.placement.items() if r == rank):
                forward, backward = done["F"][stage], done["B"][stage]
                after = [done["B"][c] for p, c in dag.edges if p == stage]
                if all(count > backward for count in [forward, *after]):
                    options.append((0, backward, -stage, "B", stage))
                before = [done["F"][p] for p, c in befores if c == stage]
                is_free = forward - backward < depths[stage]
                is_left = forward < dag.num_microbatches
                if is_free and is_left and all(n > forward for n in before):
                    options.append((1, forward, stage, "F", stage))
            if options:
                _, microbatch, _, kind, stage = min(options)
                chosen.append((rank, stage, kind, microbatch))
        for rank, stage, kind, microbatch in chosen:
            rows[rank].append(Action.from_text(f"{stage}{kind}{microbatch}"))
            done[kind][stage] += 1
    return Schedule(actions=tuple(map(tuple, rows)))


@settings(max_examples=200)
@given(stage_dags())
def test_in_unit_time_all_ranks_choose_round_by_round(dag: StageDag) -> None:
    found = dag_1f1b(dag.edges, dag.placement, dag.num_microbatches)
    assert found == in_rounds(dag)


@settings(max_examples=150)
@given(dag=stage_dags(), is_split=st.booleans(), data=st.data())
def test_a_listed_order_runs_in_the_memory_that_it_is_given(
    dag: StageDag, is_split: bool, data: st.DataObject
) -> None:
    kinds = "FIW" if is_split else "FB"
    bound = {s: data.draw(st.integers(1, 4), label="live") for s in dag.placement}
    schedule = list_schedule(
        dag.edges,
        dag.placement,
        dag.num_microbatches,
        {(stage, kind): data.draw(TIMES) for stage in dag.placement for kind in kinds},
        max_live=bound,
        split_backward=is_split,
        most_waiting=data.draw(st.none() | st.integers(0, 3)),
        delays_s={edge: data.draw(TIMES) for edge in dag.edges},
    )
    verify(
        schedule,
        dag.edges,
        placement=dag.placement,
        num_microbatches=dag.num_microbatches,
        max_live=bound,
        carriers=dag.carriers,
    )
    assert {a.kind for row in schedule.actions for a in row} == set(kinds)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 8])
def test_with_enough_memory_only_the_first_forwards_are_waited_for(
    num_ranks: int,
) -> None:
    costs = Costs.uniform(num_ranks)
    placement = {rank: rank for rank in range(num_ranks)}
    for count in (num_ranks, 3 * num_ranks):
        schedule = list_schedule(
            chain_of(num_ranks),
            placement,
            count,
            max_live=2 * num_ranks - 1,
            split_backward=True,
        )
        assert step_seconds(schedule, costs) == 3 * count + num_ranks - 1


def test_forwards_run_ahead_of_slow_messages() -> None:
    """What is on its way is waited for no longer than it takes, given the memory."""
    edges, placement, delays_s = [(0, 1)], {0: 0, 1: 1}, {(0, 1): 2.0}
    seconds = Costs.uniform(2).seconds
    late = list_schedule(edges, placement, 8, seconds, delays_s=delays_s)
    early = list_schedule(
        edges, placement, 8, seconds, delays_s=delays_s, max_live={0: 4}
    )
    assert [str(a) for a in late.actions[0][:3]] == ["0F0", "0F1", "0B0"]
    assert [str(a) for a in early.actions[0][:5]] == ["0F0", "0F1", "0F2", "0F3", "0B0"]


def test_waiting_weights_go_before_a_forward_where_that_is_asked() -> None:
    def row(most_waiting: int | None) -> str:
        schedule = list_schedule(
            [], {0: 0}, 3, max_live=3, split_backward=True, most_waiting=most_waiting
        )
        return " ".join(map(str, schedule.actions[0]))

    assert row(None) == "0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2"
    assert row(2) == "0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2"
    assert row(1) == "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"


@pytest.mark.parametrize(
    ("build", "fault"),
    [
        (lambda: list_schedule([], {0: 0}, 0), "list_schedule: .* num_microbatches=0"),
        (lambda: list_schedule([], {0: 1}, 1), r"list_schedule: .* got ranks \[1\]"),
        (lambda: list_schedule([(1, 0)], {0: 0, 1: 0}, 1), "list_schedule: .* 1->0"),
        (
            lambda: list_schedule([], {0: 0}, 1, {(0, "F"): -1.0}),
            "each of F, B, got 0F: -1.0, 0B: none",
        ),
        (
            lambda: list_schedule([], {0: 0}, 1, max_live=0),
            "max_live of at least 1 for stage 0, got 0",
        ),
    ],
)
def test_what_cannot_be_listed_is_refused(
    build: Callable[[], Schedule], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        build()
