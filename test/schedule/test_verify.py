"""What passes runs to its end with the right numbers; what breaks a law is refused."""

import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule.interpreter import Stuck, interpret, unsplit
from strategies import StageDag, legal_tables, needs_of, stage_dags

from torch_xla_pp import ScheduleError
from torch_xla_pp.schedule import (
    Action,
    Schedule,
    chain_of,
    gpipe,
    one_f_one_b,
    verify,
)

pytestmark = pytest.mark.pure


def rows(*texts: str) -> Schedule:
    return Schedule.from_cells(text.split() for text in texts)


def check(schedule: Schedule, dag: StageDag) -> None:
    verify(
        schedule,
        dag.edges,
        placement=dag.placement,
        num_microbatches=dag.num_microbatches,
        carriers=dag.carriers,
    )


@st.composite
def legal_cases(draw: st.DrawFn) -> tuple[StageDag, Schedule]:
    dag = draw(stage_dags())
    return dag, draw(legal_tables(dag))


@st.composite
def shuffled_cases(draw: st.DrawFn) -> tuple[StageDag, Schedule]:
    """Legal tables of which some actions have changed places within their rank."""
    dag, schedule = draw(legal_cases())
    changed = [list(row) for row in schedule.actions]
    for _ in range(draw(st.integers(1, 3))):
        row = draw(st.sampled_from(changed))
        place = draw(st.integers(0, len(row) - 1))
        row.insert(draw(st.integers(0, len(row) - 1)), row.pop(place))
    return dag, Schedule(actions=tuple(map(tuple, changed)))


@given(legal_cases())
def test_what_passes_gives_the_gradients_of_the_unsplit_model(
    case: tuple[StageDag, Schedule],
) -> None:
    dag, schedule = case
    check(schedule, dag)
    for got, expected in zip(interpret(schedule, dag), unsplit(dag), strict=True):
        # Both add float64 numbers, in different orders.
        assert got == pytest.approx(expected, rel=1e-12)


@given(shuffled_cases())
def test_a_table_passes_exactly_if_it_runs_to_its_end(
    case: tuple[StageDag, Schedule],
) -> None:
    dag, schedule = case
    try:
        interpret(schedule, dag)
    except Stuck:
        with pytest.raises(ScheduleError, match=r"expected after|expected no cycle"):
            check(schedule, dag)
    else:
        check(schedule, dag)


def picked(draw: Any, schedule: Schedule) -> tuple[int, int, Action]:
    """Pick an action, with its rank and step."""
    places = [
        (rank, step, action)
        for rank, row in enumerate(schedule.actions)
        for step, action in enumerate(row)
    ]
    return draw(st.sampled_from(places))


def replaced(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    changed = list(schedule.actions)
    changed[rank] = tuple(row)
    return Schedule(actions=tuple(changed))


@settings(max_examples=40)
@given(st.data(), legal_cases())
def test_a_dropped_action_is_missed(
    data: st.DataObject, case: tuple[StageDag, Schedule]
) -> None:
    dag, schedule = case
    rank, step, action = picked(data.draw, schedule)
    row = list(schedule.actions[rank])
    del row[step]
    fault = f"stage {action.stage}, microbatch {action.microbatch}: expected F and B"
    with pytest.raises(ScheduleError, match=fault) as error:
        check(replaced(schedule, rank, row), dag)
    assert error.value.rank == rank


@settings(max_examples=40)
@given(st.data(), legal_cases())
def test_a_doubled_action_is_found(
    data: st.DataObject, case: tuple[StageDag, Schedule]
) -> None:
    dag, schedule = case
    rank, _, action = picked(data.draw, schedule)
    row = list(schedule.actions[rank])
    row.insert(data.draw(st.integers(0, len(row))), action)
    with pytest.raises(ScheduleError, match=f"{action}: expected once, got 2 times"):
        check(replaced(schedule, rank, row), dag)


@settings(max_examples=40)
@given(st.data(), legal_cases())
def test_exchanging_what_depends_on_each_other_is_found(
    data: st.DataObject, case: tuple[StageDag, Schedule]
) -> None:
    dag, schedule = case
    split = {
        (a.stage, a.microbatch) for r in schedule.actions for a in r if a.kind in "IW"
    }
    whole = {
        (stage, mb): (stage, mb) not in split
        for stage in range(dag.num_stages)
        for mb in range(dag.num_microbatches)
    }
    rank, step, action = picked(data.draw, schedule)
    row = list(schedule.actions[rank])
    earlier = [before for before in needs_of(dag, whole)[action] if before in row]
    assume(earlier)
    other = row.index(data.draw(st.sampled_from(sorted(earlier, key=str))))
    row[step], row[other] = row[other], row[step]
    with pytest.raises(ScheduleError, match=f"{action}: expected after {row[step]} "):
        check(replaced(schedule, rank, row), dag)


@settings(max_examples=40)
@given(st.data(), legal_cases())
def test_an_action_on_another_rank_is_found(
    data: st.DataObject, case: tuple[StageDag, Schedule]
) -> None:
    dag, schedule = case
    assume(schedule.num_ranks > 1)
    rank, step, action = picked(data.draw, schedule)
    row = list(schedule.actions[rank])
    del row[step]
    there = (rank + 1) % schedule.num_ranks
    moved = replaced(schedule, rank, row)
    moved = replaced(moved, there, [*moved.actions[there], action])
    fault = f"expected stage {action.stage} on rank {rank}, got it on rank {there}"
    with pytest.raises(ScheduleError, match=fault):
        check(moved, dag)


@settings(max_examples=40)
@given(st.data(), legal_cases())
def test_forwards_alone_are_legal_for_evaluation(
    data: st.DataObject, case: tuple[StageDag, Schedule]
) -> None:
    dag, schedule = case
    forwards = Schedule(
        actions=tuple(
            tuple(action for action in row if action.kind == "F")
            for row in schedule.actions
        )
    )
    verify(forwards, dag.edges, carriers=dag.carriers, forward_only=True)
    with pytest.raises(ScheduleError, match="expected F and B, or F and I and W, got"):
        verify(forwards, dag.edges)
    with pytest.raises(ScheduleError, match="expected F, got F and "):
        verify(schedule, dag.edges, forward_only=True)


@pytest.mark.parametrize(
    ("table", "options", "fault", "where"),
    [
        (
            ["0F0 0B0", "1F0"],
            {},
            r"stage 1, microbatch 0: expected F and B, or F and I and W, got F\. Add",
            (1, None, "1B0"),
        ),
        (
            ["0F0 0I0 0W0", "1F0 1I0"],
            {},
            "stage 1, microbatch 0: .* got F and I",
            (1, None, "1W0"),
        ),
        (
            ["0F0 0B0", "1F0 1B0 1W0"],
            {},
            "stage 1, microbatch 0: .* got F and B and W",
            (1, 2, "1W0"),
        ),
        (
            ["0F0 0B0", "1F0 1B0"],
            {"num_microbatches": 3},
            r"stage 0, microbatch 1\.\.2: .* got nothing",
            (0, None, "0F1"),
        ),
        (
            ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"],
            {"num_microbatches": 1},
            r"rank 1, step 2: 1F1: expected microbatches 0, got 1\. Build",
            (0, 2, "0F1"),
        ),
        (
            ["0F0 0B0"],
            {"edges": [(0, 1)]},
            "stage 1, microbatch 0: .* got nothing",
            (None, None, "1F0"),
        ),
        (
            ["0F0 0B0", "1F0 1B0"],
            {"placement": {0: 1, 1: 0}},
            "rank 0, step 0: 0F0: expected stage 0 on rank 1, got it on rank 0",
            (0, 0, "0F0"),
        ),
        (
            ["0F0 0B0", "1F0 1B0"],
            {"placement": {0: 0}},
            "rank 1, step 0: 1F0: expected stage 1 nowhere, got it on rank 1",
            (1, 0, "1F0"),
        ),
        (
            ["0B0 0F0"],
            {},
            r"step 0: 0B0: expected after 0F0 \(it uses what F saves\), got that at st",
            (0, 0, "0B0"),
        ),
        (
            ["0F0 0W0 0I0"],
            {},
            r"step 1: 0W0: expected after 0I0 \(it uses what I saves\)",
            (0, 1, "0W0"),
        ),
        (
            ["1F0 0F0 1B0 0B0"],
            {},
            r"1F0: expected after 0F0 \(stage 1 uses values of stage 0\)",
            (0, 0, "1F0"),
        ),
        (
            ["0F0 1F0 0B0 1I0 1W0"],
            {},
            r"0B0: expected after 1I0 \(stage 1 uses values of stage 0\)",
            (0, 2, "0B0"),
        ),
        (
            ["0F1 0F0 0B0 0B1"],
            {},
            r"0F1: expected after 0F0 \(losses are listed in the order",
            (0, 0, "0F1"),
        ),
        (
            ["0F0 0B0", "2F0 1F0 2B0 1B0"],
            {"edges": [(0, 1), (0, 2)], "carriers": [(1, 2)]},
            r"2F0: expected after 1F0 \(stage 1 receives a value for both\)",
            (1, 0, "2F0"),
        ),
        (
            ["0F0 0F1 0B0 0B1"],
            {"max_live": 1},
            "0F1: expected at most 1 live microbatches in stage 0, got 2",
            (0, 1, "0F1"),
        ),
        (
            ["0F0 0I0 0F1 0W0 0I1 0W1"],
            {"max_live": {0: 1}},
            "0F1: expected at most 1 live microbatches in stage 0, got 2",
            (0, 2, "0F1"),
        ),
    ],
)
def test_each_law_has_its_error(
    table: list[str],
    options: Mapping[str, Any],
    fault: str,
    where: tuple[int | None, int | None, str],
) -> None:
    schedule = rows(*table)
    options = {"edges": chain_of(schedule.num_stages), **options}
    with pytest.raises(ScheduleError, match=fault) as error:
        verify(schedule, **options)
    assert (error.value.rank, error.value.step, error.value.action) == where


def test_a_cycle_is_told_as_a_chain_of_waiting_actions() -> None:
    schedule = rows("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(
        ScheduleError, match="expected one that can run, got 1 fault:"
    ) as e:
        verify(schedule, chain_of(2))
    waiting = "0B0: expected no cycle of ranks that wait for each other, got"
    assert str(e.value).splitlines()[1:] == [
        f"  rank 0, step 1: {waiting}",
        "    rank 0, step 1: 0B0 waits for 1B0 (rank 1, step 2)",
        "    rank 1, step 1: 1F1 waits for 0F1 (rank 0, step 2)",
        "    Let one of these ranks run earlier what another waits for.",
        "step  rank 0   rank 1",
        "0     0F0      1F0",
        "1     0B0 <--  1F1",
        "2     0F1      1B0",
        "3     0B1      1B1",
    ]
    assert (e.value.rank, e.value.step, e.value.action) == (0, 1, "0B0")


def test_a_cycle_names_only_the_ranks_in_it() -> None:
    """Rank 0 waits for the cycle of ranks 1 and 2, but is not part of it."""
    schedule = rows("0F0 0B0", "1F0 1B0 3F0 3B0", "2F0 4F0 4B0 2B0")
    with pytest.raises(ScheduleError, match="1B0 waits for 3B0|1B0: expected") as error:
        verify(schedule, [(0, 1), (1, 2), (2, 3), (1, 3), (3, 4)])
    assert "rank 0, step 1: 0B0 waits" not in str(error.value)


def test_all_faults_are_listed_and_the_first_is_pointed_at() -> None:
    schedule = rows("0B0 0F0", "1F0 1F0 1B0")
    with pytest.raises(ScheduleError, match="got 2 faults:") as error:
        verify(schedule, [])
    text = str(error.value)
    assert "1F0: expected once" in text and "0B0: expected after 0F0" in text
    assert text.count("<--") == 1 and "1F0 <--" in text


def test_of_a_long_table_the_steps_near_the_culprit_are_shown() -> None:
    schedule = gpipe(2, 100)
    row = list(schedule.actions[1])
    row[150], row[50] = row[50], row[150]
    with pytest.raises(ScheduleError, match="1B50: expected after 1F50") as error:
        verify(replaced(schedule, 1, row), chain_of(2))
    lines = str(error.value).splitlines()
    assert lines.count("...") == 2
    assert len(lines) < 40
    assert any("<--" in line and line.startswith("50 ") for line in lines)


def test_of_a_long_table_without_a_culprit_the_first_steps_are_shown() -> None:
    schedule = gpipe(2, 100)
    with pytest.raises(ScheduleError, match=r"microbatch 99: .* got F\.") as error:
        verify(replaced(schedule, 1, list(schedule.actions[1])[:-1]), chain_of(2))
    lines = str(error.value).splitlines()
    assert lines[-1] == "..." and lines[-2].startswith("20 ")


def test_edges_must_lead_to_a_higher_stage() -> None:
    with pytest.raises(ValueError, match=r"verify: expected edges from .* got 1->0"):
        verify(gpipe(2, 2), [(1, 0)])


def test_stages_may_be_anywhere() -> None:
    schedule = rows("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    verify(schedule, chain_of(4), placement={0: 0, 1: 1, 2: 1, 3: 0})


def test_a_large_table_is_verified_in_seconds() -> None:
    schedule = one_f_one_b(64, 256)
    begin = time.process_time()
    verify(schedule, chain_of(64), max_live=64)
    assert time.process_time() - begin < 5
