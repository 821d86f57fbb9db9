"""An order listed for costs, and the time that comes with it."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import flows_along, stage_dags

from torch_xla_pp.schedule import possible_carriers, verify
from torch_xla_pp.simulate import (
    Costs,
    Flow,
    Link,
    Network,
    listed_step,
    step_seconds,
)

pytestmark = pytest.mark.pure

TIMES = st.floats(0, 100)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_time_of_a_listed_order_is_that_of_its_step(data: st.DataObject) -> None:
    dag = data.draw(stage_dags())
    seconds = {(s, k): data.draw(TIMES) for s in range(dag.num_stages) for k in "FBIW"}
    final_s = {s: data.draw(TIMES) for s in range(dag.num_stages)}
    flows = data.draw(flows_along(dag.edges))
    costs = Costs(seconds=seconds, flows=flows, final_s=final_s)
    link = Link(latency_s=data.draw(TIMES), bytes_per_s=data.draw(st.floats(0.1, 10)))
    network = Network(default=link)
    placement = [dag.placement[stage] for stage in range(dag.num_stages)]
    is_split = data.draw(st.booleans())
    most_live = data.draw(
        st.lists(st.integers(1, 5), min_size=dag.num_stages, max_size=dag.num_stages)
    )
    waiting = data.draw(st.none() | st.integers(1, 3))

    def listed(limit_s: float) -> tuple[object, float] | None:
        return listed_step(
            costs,
            placement,
            dag.num_microbatches,
            network,
            most_live,
            split_backward=is_split,
            most_waiting=waiting,
            limit_s=limit_s,
        )

    found = listed(inf)
    assert found is not None
    schedule, step_s = found
    verify(
        schedule,
        dag.edges,
        placement=dag.placement,
        num_microbatches=dag.num_microbatches,
        max_live=dict(enumerate(most_live)),
        carriers=possible_carriers(dag.edges, placement),
    )
    whole_s = step_seconds(schedule, costs, network)
    assert step_s == pytest.approx(whole_s, rel=1e-9, abs=1e-12)
    # A limit changes nothing but that longer steps are not made.
    limit_s = data.draw(st.floats(0, 2)) * step_s
    if limit_s >= step_s:
        assert listed(limit_s) == found
        assert step_seconds(schedule, costs, network, limit_s=limit_s) == whole_s
    elif limit_s < 0.999 * step_s:
        assert listed(limit_s) is None
        assert step_seconds(schedule, costs, network, limit_s=limit_s) > limit_s


def test_a_value_that_is_made_early_starts_what_needs_it_early() -> None:
    costs = [
        Costs(
            seconds={(0, "F"): 4, (0, "B"): 1, (1, "F"): 1, (1, "B"): 1},
            flows=(Flow(producer=0, consumers=(1,), made_at=made_at),),
        )
        for made_at in (1.0, 0.25)
    ]
    steps = [
        found[1]
        for own in costs
        if (
            found := listed_step(
                own, [0, 1], 1, Network(), [1, 1], split_backward=False
            )
        )
    ]
    # All in turn, or all of stage 1 beside the F of stage 0.
    assert steps == [7.0, 5.0]


def test_backwards_keep_to_edges_that_send_no_gradient() -> None:
    flow = Flow(producer=0, consumers=(1,), has_gradient=False)
    costs = Costs(
        seconds={(0, "F"): 1, (0, "B"): 1, (1, "F"): 1, (1, "B"): 5}, flows=(flow,)
    )
    found = listed_step(costs, [0, 1], 2, Network(), [2, 2], split_backward=False)
    assert found is not None
    schedule, step_s = found
    verify(schedule, [(0, 1)], num_microbatches=2)
    assert step_s == step_seconds(schedule, costs)
    less = listed_step(
        costs, [0, 1], 2, Network(), [2, 2], split_backward=False, limit_s=0.9 * step_s
    )
    assert less is None
