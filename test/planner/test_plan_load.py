"""A plan states what its devices compute and exchange, and what bounds them."""

from dataclasses import replace

import pytest
from planner_models import gpt

from torch_xla_pp.advice import advise
from torch_xla_pp.planner import DEVICES, PipelinePlan, make_plan
from torch_xla_pp.simulate import Link, Network

pytestmark = pytest.mark.pure

WORK = gpt(4, 256, 128)


def plan_of(**asked: object) -> PipelinePlan:
    given = {
        "rows": 32,
        "ranks": 2,
        "device": "v5p",
        "replicas": (1,),
        "microbatches": (4,),
        "remat": ("none",),
    }
    return make_plan(WORK, **(given | asked))  # type: ignore[arg-type]


def test_devices_do_all_of_the_models_work_together() -> None:
    rows = 8
    works = WORK.works
    for mesh, per_rank in (((1, 1), 1), ((2, 1), 2)):
        load = plan_of(devices_per_rank=per_rank, meshes=(mesh,)).load()
        costs = {
            "F": [work.forward for work in works],
            "I": [work.backward_input for work in works],
            "W": [work.backward_weight for work in works],
        }
        for kind, own in costs.items():
            stated = sum(stage.flops[kind] for stage in load.stages)
            all_of_it = sum(c.flops_per_row * rows / per_rank + c.flops for c in own)
            assert stated == pytest.approx(all_of_it)


def test_stages_that_compute_again_do_so_before_the_gradients() -> None:
    once, twice = (
        plan_of(remat=(remat,), schedules=("1f1b",)).load()
        for remat in ("none", "full")
    )
    for a, b in zip(once.stages, twice.stages, strict=True):
        assert b.flops["I"] == pytest.approx(a.flops["I"] + a.flops["F"], rel=0.5)
        assert b.flops["F"] + b.flops["W"] < b.flops["F"] + b.flops["I"]
    stated = [sum(sum(s.flops.values()) for s in load.stages) for load in (once, twice)]
    forwards = sum(stage.flops["F"] for stage in once.stages)
    assert stated[1] - stated[0] == pytest.approx(forwards)


def test_exchanges_are_those_that_times_count_and_more() -> None:
    plan = plan_of(devices_per_rank=4, meshes=((2, 2),), ranks=4, replicas=(2,))
    load = plan.load()
    within = {
        (s.stage, e.when, e.kind, e.axis, e.count, round(e.num_bytes))
        for s in load.stages
        for e in s.exchanges
        if e.axis not in ("pp", "replicas")
    }
    assert within == {
        (c.stage, c.when, c.kind, c.axis, c.count, c.bytes)
        for c in plan.predicted.collectives
    }
    assert {e.num_devices for s in load.stages for e in s.over("data")} == {2}
    sent = sum(
        4 * e.num_bytes for s in load.stages for e in s.over("pp") if e.when == "F"
    )
    assert sent == sum(flow.num_bytes for flow in plan.predicted.flows)
    summed = sum(4 * e.num_bytes for s in load.stages for e in s.over("replicas"))
    assert summed == plan.model.parameter_bytes


def test_devices_of_a_rank_share_the_links_that_leave_it() -> None:
    slow = Network(default=Link(bytes_per_s=8e9), links={(0, 1): Link(bytes_per_s=4e9)})
    plan = plan_of(devices_per_rank=4, meshes=((4, 1),), network=slow)
    machine = plan.load().machine
    assert machine is not None
    assert machine.bytes_per_s("pp") == 1e9
    assert machine.bytes_per_s("replicas") == 2e9
    assert machine.bytes_per_s("data") == DEVICES["v5p"].link_bytes_per_s
    free = plan_of(network=Network()).load().machine
    assert free is not None and free.bytes_per_s("pp") == 1e18


def test_replicas_over_slow_links_take_longer_and_are_told() -> None:
    asked = {"ranks": 4, "devices_per_rank": 2, "replicas": (2,), "meshes": ((2, 1),)}
    link = Link(latency_s=0.5, bytes_per_s=1e9)
    fast, slow = plan_of(**asked), plan_of(**asked, replica_link=link)
    assert slow.costs.replica_link is not None and fast.costs.replica_link is None
    assert PipelinePlan.from_json(slow.to_json()) == slow
    kept = DEVICES["v5p"]
    late = [
        b.final_s - a.final_s
        for a, b in zip(fast.predicted.stages, slow.predicted.stages, strict=True)
    ]
    # Each stage sums its gradients over a ring of two: two rounds of half of them.
    num_bytes = slow.model.parameter_bytes
    expected = 2 * (0.5 - kept.link_latency_s) * 2
    expected += num_bytes * (1e-9 - 1 / kept.link_bytes_per_s)
    assert sum(late) == pytest.approx(expected)
    (bound,) = [b for b in advise(slow).bounds if b.axis == "replicas"][:1]
    assert bound.needed == pytest.approx(kept.flops_per_s / 0.5e9)


def test_a_slow_link_between_replicas_makes_fewer_of_them() -> None:
    asked = {"ranks": 4, "replicas": (1, 2, 4), "microbatches": (8,)}
    slow = Link(latency_s=1e-3, bytes_per_s=1e6)
    found = [plan_of(**asked, replica_link=link) for link in (Link(), slow)]
    assert found[0].batch.replicas > found[1].batch.replicas == 1


def test_a_printed_plan_says_what_could_be_better() -> None:
    slow = Network(default=Link(bytes_per_s=1e6))
    plan = plan_of(network=slow, microbatches=(2,))
    text = str(plan)
    assert "advice pp, stage 1: " in text
    assert "       faster links between ranks, or no pipeline" in text
    assert "4 microbatches, two for each rank, in place of 2: 20.0 %" in text
    assert "bound by products" not in text
    assert "advice" not in str(replace(plan, device_load=None))
    assert PipelinePlan.from_json(plan.to_json()) == plan


def test_a_plan_may_be_asked_of_other_devices() -> None:
    plan = plan_of(devices_per_rank=2, meshes=((2, 1),))
    assert advise(plan).machine.name == "v5p"
    assert advise(plan, device="v5e").machine.name == "v5e"
    with pytest.raises(ValueError, match="a plan of an earlier version, or of"):
        advise(replace(plan, device_load=None))
