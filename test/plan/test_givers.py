"""Plan, verification, builders and simulation agree on who hands a value on."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import StageDag, items_taken, shuffled, stage_dags

from torch_xla_pp.errors import ScheduleError
from torch_xla_pp.graph import Template
from torch_xla_pp.plan import Consumers, StageInputs, Wiring
from torch_xla_pp.schedule import Schedule, dag_1f1b, givers_of, verify
from torch_xla_pp.simulate import Costs, Flow, simulate

pytestmark = pytest.mark.pure

NUM_NAMED = 3
# The last item is taken only with all others.
OUTPUT, _ = Template.of(tuple(torch.ones(1) for _ in range(NUM_NAMED + 1)))


@dataclass(frozen=True, kw_only=True)
class Case:
    """Stages, their ranks, and the items of outputs that each takes."""

    dag: StageDag
    wiring: Wiring

    @property
    def consumers(self) -> list[Consumers]:
        return [
            self.wiring.consumers_of_values(stage, OUTPUT)
            for stage in range(self.dag.num_stages)
        ]

    @property
    def handed_on(self) -> set[tuple[int, int, int]]:
        """Producer, giver and consumer, as the plan has them."""
        stages = range(self.dag.num_stages)
        return {
            (found.producer, giver, consumer)
            for found in self.consumers
            for giver in stages
            for consumer in stages
            if found.passed(giver, consumer)
        }

    @property
    def flows(self) -> tuple[Flow, ...]:
        return tuple(
            Flow(
                producer=found.producer, consumers=found.consumers_of(slot), num_bytes=1
            )
            for found in self.consumers
            for slot in range(OUTPUT.num_slots)
            if found.consumers_of(slot)
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dag = draw(stage_dags())
    taken = draw(items_taken(dag, NUM_NAMED))
    inputs = [
        StageInputs.of(
            consumer,
            [
                producer if item is None else (producer, item)
                for (producer, taker), items in taken.items()
                if taker == consumer
                for item in items
            ],
        )
        for consumer in range(dag.num_stages)
    ]
    ranks = [dag.placement[stage] for stage in range(dag.num_stages)]
    return Case(dag=dag, wiring=Wiring(inputs=inputs, ranks=ranks))


def can_run(schedule: Schedule, case: Case) -> bool:
    try:
        verify(schedule, case.dag.edges, carriers=case.wiring.carriers())
    except ScheduleError:
        return False
    return True


def can_be_simulated(schedule: Schedule, case: Case) -> bool:
    costs = Costs.uniform(case.dag.num_stages)
    seconds = costs.seconds
    try:
        simulate(schedule, Costs(seconds=seconds, flows=case.flows))
    except ScheduleError:
        return False
    return True


@given(cases())
def test_verification_knows_the_carriers_that_the_plan_has(case: Case) -> None:
    found = {(giver, c) for p, giver, c in case.handed_on if giver != p}
    assert set(case.wiring.carriers()) == found


@settings(deadline=None)
@given(cases(), st.integers(1, 3))
def test_what_is_built_from_edges_runs_whatever_the_items_are(
    case: Case, num_microbatches: int
) -> None:
    dag = case.dag
    schedule = dag_1f1b(dag.edges, dag.placement, num_microbatches)
    assert can_run(schedule, case)


def test_a_builder_does_not_take_the_values_of_a_stage_for_one() -> None:
    """Stage 5 waits long, and gives 6 an item that 4, the first, does not take."""
    edges = ((0, 1), (1, 2), (2, 3), (0, 4), (0, 5), (3, 5), (0, 6))
    placement = {0: 0, 1: 2, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1}
    inputs = [[], [0], [1], [2], [(0, 0)], [(0, 1), 3], [(0, 1)]]
    wiring = Wiring(
        inputs=[StageInputs.of(stage, taken) for stage, taken in enumerate(inputs)],
        ranks=list(placement.values()),
    )
    assert wiring.carriers() == [(5, 6)]
    schedule = dag_1f1b(edges, placement, 2)
    verify(schedule, edges, carriers=wiring.carriers())


@settings(deadline=None)
@given(cases(), st.data())
def test_a_simulation_runs_what_verification_lets_through(
    case: Case, data: st.DataObject
) -> None:
    built = dag_1f1b(case.dag.edges, case.dag.placement, 1)
    schedule = data.draw(shuffled(built))
    assert can_be_simulated(schedule, case) == can_run(schedule, case)


@settings(deadline=None)
@given(cases())
def test_a_simulation_sends_what_the_plan_sends(case: Case) -> None:
    dag = case.dag
    schedule = dag_1f1b(dag.edges, dag.placement, 1)
    costs = Costs(seconds=Costs.uniform(dag.num_stages).seconds, flows=case.flows)
    sent = {
        (transfer.sender_stage, transfer.receiver_stage)
        for transfer in simulate(schedule, costs).transfers
        if transfer.kind == "F"
    }
    ranks = case.wiring.ranks
    assert sent == {(g, c) for _, g, c in case.handed_on if ranks[g] != ranks[c]}


def test_the_lowest_user_on_a_rank_gets_a_value_for_the_others() -> None:
    ranks = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 1}
    givers = givers_of(0, [5, 1, 2, 4, 3], ranks)
    assert givers == {1: 0, 2: 0, 3: 2, 4: 0, 5: 2}


def test_a_stage_waits_only_for_the_one_that_receives_for_it() -> None:
    inputs = [StageInputs.of(stage, [0] if stage else []) for stage in range(4)]
    wiring = Wiring(inputs=inputs, ranks=(0, 1, 1, 1))
    assert wiring.carriers() == [(1, 2), (1, 3)]
