"""A plan has the collectives that its times count."""

from dataclasses import replace

import pytest
from planner_models import gpt, mmt

from torch_xla_pp.planner import DEVICES, PipelinePlan, make_plan
from torch_xla_pp.planner.devices import Cluster
from torch_xla_pp.planner.evaluation import Cut, Evaluator, Setting
from torch_xla_pp.planner.predicted_collectives import predicted_collectives
from torch_xla_pp.planner.strategies import Strategy
from torch_xla_pp.planner.work_costs import WorkTable

pytestmark = pytest.mark.pure

STRATEGIES = [
    Strategy(data=4),
    Strategy(model=4),
    Strategy(data=2, model=2),
    Strategy(data=2, model=2, has_fsdp=True),
    Strategy(data=4, has_fsdp=True),
]


def cut_of(strategy: Strategy, remat: tuple[str, ...]) -> Cut:
    setting = Setting(num_ranks=2, strategy=strategy, rows=8, num_microbatches=4)
    count = len(gpt(2, 64, 32).works)
    stages = tuple(int(place >= count // 2) for place in range(count))
    return Cut(setting=setting, stages=stages, remat=remat)


def evaluator_of(latency_s: float) -> Evaluator:
    """Links take so long for each collective, and nothing for its bytes."""
    device = replace(DEVICES["v5p"], link_latency_s=latency_s, link_bytes_per_s=1e30)
    cluster = Cluster(device=device, num_devices=8)
    return Evaluator(table=WorkTable(gpt(2, 64, 32)), cluster=cluster)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("remat", [("none", "none"), ("full", "none")])
def test_as_many_collectives_are_told_as_times_count(
    strategy: Strategy, remat: tuple[str, ...]
) -> None:
    cut = cut_of(strategy, remat)
    slow, fast = evaluator_of(1.0), evaluator_of(0.0)
    found = predicted_collectives(slow.works(strategy, 8), cut)
    seconds = [evaluator.costs(cut).seconds for evaluator in (slow, fast)]
    for stage in range(2):
        for when in ("F", "I", "W"):
            # A sum of all is a reduce-scatter and a gather.
            stated = sum(
                one.count * (2 if one.kind == "all-reduce" else 1)
                for one in found
                if (one.stage, one.when) == (stage, when)
            )
            late = seconds[0][stage, when] - seconds[1][stage, when]
            assert late == pytest.approx(stated)


def test_gradients_of_equal_copies_are_summed_once_a_step() -> None:
    evaluator = evaluator_of(0.0)
    strategy = Strategy(data=4)
    found = predicted_collectives(
        evaluator.works(strategy, 8), cut_of(strategy, ("none",) * 2)
    )
    assert {(one.when, one.kind, one.axis) for one in found} == {
        ("step", "all-reduce", "data")
    }
    held = sum(p.bytes for work in gpt(2, 64, 32).works for p in work.parameters)
    assert sum(one.bytes for one in found) == held


def test_a_plan_keeps_them_and_one_device_has_none() -> None:
    asked = {"rows": 32, "ranks": 2, "device": "v5p", "replicas": (1,)}
    alone = make_plan(mmt(1), **asked)  # type: ignore[arg-type]
    assert alone.predicted.collectives == ()
    split = make_plan(mmt(1), devices_per_rank=2, meshes=((1, 2),), **asked)  # type: ignore[arg-type]
    assert {one.axis for one in split.predicted.collectives} == {"model"}
    assert PipelinePlan.from_json(split.to_json()) == split
