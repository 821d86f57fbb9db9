from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import legal_tables, stage_dags

from torch_xla_pp.runtime.joined_actions import JoinedActions
from torch_xla_pp.schedule import (
    Schedule,
    chain_of,
    dualpipev,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zb1p,
    zbv,
)
from torch_xla_pp.simulate import Costs, stage_seconds, step_seconds

pytestmark = pytest.mark.pure


def prompt_ranks(schedule: Schedule) -> list[int]:
    edges = chain_of(schedule.num_stages)
    ranks = range(schedule.num_ranks)
    return [r for r in ranks if JoinedActions(schedule, edges, r).is_prompt]


@pytest.mark.parametrize(
    ("schedule", "rank"),
    [
        (gpipe(4, 8), 3),
        (one_f_one_b(4, 8), 3),
        (interleaved_1f1b(2, 8, 2), 1),
        (zb1p(2, 8, 1), 1),
        (zbv(2, 8), 0),
        (dualpipev(4, 8), 0),
    ],
)
def test_the_last_stage_need_not_wait_for_its_backward(
    schedule: Schedule, rank: int
) -> None:
    assert prompt_ranks(schedule) == [rank]


def test_it_waits_where_others_would_wait_longer() -> None:
    # Stage 1 waits for 0F1, which would come after 2B0.
    rows = ["0F0 2F0 0F1 2B0 2F1 2B1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert prompt_ranks(Schedule.from_cells(map(str.split, rows))) == []
    rows[0] = "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"
    assert prompt_ranks(Schedule.from_cells(map(str.split, rows))) == [0]


SECONDS = st.tuples(*[st.floats(0.5, 1.5)] * 3)


@given(st.lists(SECONDS, min_size=4, max_size=4))
def test_gpipe_takes_no_longer_whatever_stages_take(
    times: list[tuple[float, float, float]],
) -> None:
    order = gpipe(4, 8)
    costs = replace(Costs.uniform(4), seconds=stage_seconds(times))
    prompt_s = step_seconds(order.with_backwards_at_once(3), costs)
    assert prompt_s <= step_seconds(order, costs) * (1 + 1e-9)


@given(st.data())
def test_any_order_that_can_run_has_an_answer(data: st.DataObject) -> None:
    dag = data.draw(stage_dags())
    schedule = data.draw(legal_tables(dag))
    for rank in range(schedule.num_ranks):
        assert JoinedActions(schedule, dag.edges, rank).is_prompt in (False, True)


def test_an_order_that_is_not_known_joins_nothing() -> None:
    found = JoinedActions(None, [(0, 1)], 1)
    assert not found.is_prompt
    assert not found.inputs | found.whole
    assert found.last is None


def test_the_kinds_of_backwards() -> None:
    schedule = Schedule.from_cells(["0F0 0I0 0W0 0F1 0I1 0F2 0W1 0B2".split()])
    found = JoinedActions(schedule, [], 0)
    assert {str(action) for action in found.inputs} == {"0I0", "0I1"}
    assert {str(action) for action in found.whole} == {"0I0"}
    assert str(found.last) == "0B2"
