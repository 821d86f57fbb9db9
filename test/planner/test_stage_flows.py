"""What stages send each other, and when in an action it is there."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_models import joined_branches

from torch_xla_pp.planner.devices import DEVICES, Cluster
from torch_xla_pp.planner.evaluation import Cut, Evaluator, Setting
from torch_xla_pp.planner.stage_flows import WorkParts
from torch_xla_pp.planner.work_costs import WorkTable

pytestmark = pytest.mark.pure

# Sums of all works are taken at once: what is lost in them is not a time of work.
TIMES = st.just(0.0) | st.floats(1e-4, 9)


@settings(max_examples=50, deadline=None)
@given(
    works=st.lists(st.tuples(st.integers(0, 2), TIMES, TIMES), min_size=1, max_size=8),
    action_s=TIMES,
    again_s=st.tuples(TIMES, TIMES, TIMES),
)
def test_works_run_in_their_order_and_backwards(
    works: list[tuple[int, float, float]],
    action_s: float,
    again_s: tuple[float, float, float],
) -> None:
    stages, forward_s, backward_s = zip(*works, strict=True)
    parts = WorkParts.in_order(
        np.array(stages),
        np.array(forward_s),
        np.array(backward_s),
        action_s=action_s,
        again_s=np.array(again_s),
    )
    for place, stage in enumerate(stages):
        own = [other for other, found in enumerate(stages) if found == stage]
        before_s = action_s + again_s[stage]
        for found, start_s, seconds, done in (
            (parts.forward, action_s, forward_s, [o for o in own if o <= place]),
            (parts.backward, before_s, backward_s, [o for o in own if o >= place]),
        ):
            whole_s = start_s + sum(seconds[other] for other in own)
            done_s = start_s + sum(seconds[other] for other in done)
            part = done_s / whole_s if whole_s else 1.0
            assert found[place] == pytest.approx(part, abs=1e-9)
            assert found[place] <= 1
            assert found[place] == 1 or done != own


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(("name", "is_early"), [("cpu", True), ("v5e", False)])
def test_a_gradient_leaves_after_what_uses_its_value(
    schedule: str, remat: str, name: str, is_early: bool
) -> None:
    """Stage 0 is a branch; stage 1 is the other one and, last, the join of both."""
    cluster = Cluster(device=DEVICES[name], num_devices=2)
    evaluator = Evaluator(
        table=WorkTable(joined_branches()), cluster=cluster, has_own_inputs=True
    )
    setting = Setting(num_ranks=2, rows=1, num_microbatches=4, schedule=schedule)
    cut = Cut(setting=setting, stages=(0, 0, 1, 1, 1), remat=(remat,) * 2)
    costs = evaluator.evaluate(cut).costs
    (flow,) = costs.flows
    assert flow.made_at == 1
    if not is_early:
        assert flow.graded_at == ()
        return
    works = evaluator.works(setting.strategy, 1)
    forward, inputs, weights = works.seconds
    start_s = DEVICES[name].action_s
    if remat == "full":
        start_s += forward[2:].sum()
    if schedule == "zb1p":
        join_s = inputs[4] + works.split_s[4]
    else:
        join_s = inputs[4] + weights[4]
    kind = "I" if schedule == "zb1p" else "B"
    early_s = start_s + join_s
    assert flow.graded_at == (pytest.approx(early_s / costs.seconds[1, kind]),)


def test_a_value_that_is_made_early_leaves_early() -> None:
    """The first stage has made what the join reads before its second branch."""
    cluster = Cluster(device=DEVICES["cpu"], num_devices=2)
    evaluator = Evaluator(
        table=WorkTable(joined_branches()), cluster=cluster, has_own_inputs=True
    )
    setting = Setting(num_ranks=2, rows=1, num_microbatches=4)
    cut = Cut(setting=setting, stages=(0, 0, 0, 1, 1), remat=("none",) * 2)
    costs = evaluator.evaluate(cut).costs
    forward, _, _ = evaluator.works(setting.strategy, 1).seconds
    # Both values go to the same stage, so they leave together, with the later one.
    (flow,) = costs.flows
    assert flow.made_at == 1
    cut = Cut(setting=setting, stages=(0, 1, 0, 1, 1), remat=("none",) * 2)
    (flow,) = evaluator.evaluate(cut).costs.flows
    assert flow.made_at == 1
    setting = Setting(num_ranks=3, rows=1, num_microbatches=4, schedule="dag")
    cut = Cut(setting=setting, stages=(0, 1, 0, 2, 2), remat=("none",) * 3)
    flows = {flow.edges: flow for flow in evaluator.evaluate(cut).costs.flows}
    seconds = evaluator.evaluate(cut).costs.seconds[0, "F"]
    early = flows[(0, 1),].made_at
    assert early == pytest.approx((1e-3 + forward[0]) / seconds)
    assert flows[(0, 2),].made_at == 1
