"""What the planner predicts for published cases stays what the docs report."""

import pytest
from planner_models import (
    candle,
    case_study,
    gpt,
    mmt,
    sequential,
    three_branches,
)
from planner_published import (
    LENGTH,
    TABLE_1,
    VOCAB,
    best_plan,
    depth_rows,
    gain_of,
    megatron_plan,
    speed_of,
)

from torch_xla_pp.planner.devices import DEVICES, Cluster
from torch_xla_pp.planner.evaluation import Evaluator
from torch_xla_pp.planner.settings import Request, settings_for
from torch_xla_pp.planner.work_costs import WorkTable
from torch_xla_pp.work import WorkGraph

pytestmark = pytest.mark.pure


def test_depths_of_graphpipes_figures_are_reproduced() -> None:
    two = depth_rows("figure 2", three_branches(), 4, {"spp": 4, "graphpipe": 2})
    assert {ratio for *_, ratio in two} == {"1.000"}
    rows = depth_rows("7.5", case_study(), 8, {"spp": 8, "graphpipe": 5})
    assert {ratio for *_, ratio in rows} == {"1.000"}


def test_a_sequential_model_gains_nothing_and_branches_gain() -> None:
    gain = gain_of(sequential(), 8, "10g25u", 8, has_same_rows=False)
    assert gain == pytest.approx(1.0, abs=1e-12)
    assert gain_of(candle(8), 8, "40g25u", 128, has_same_rows=False) > 1.2


def test_branches_gain_with_the_microbatches_of_the_chain_alone() -> None:
    same = gain_of(mmt(2), 8, "40g25u", 8, has_same_rows=True)
    free = gain_of(mmt(2), 8, "40g25u", 8, has_same_rows=False)
    assert 1.0 < same <= free


@pytest.mark.parametrize("number", [0, 3, 5])
def test_throughput_of_megatrons_table_is_predicted_within_15_percent(
    number: int,
) -> None:
    _, width, layers, tensor, ranks, devices, batch, published = TABLE_1[number]
    graph = gpt(layers, width, LENGTH, VOCAB)
    found = megatron_plan(graph, devices, batch, tensor, ranks)
    assert found is not None and found.fits
    assert abs(speed_of(found, TABLE_1[number]) / published - 1) < 0.15


def settings_of(graph: WorkGraph, microbatches: tuple[int, ...] | None) -> int:
    cluster = Cluster(device=DEVICES["v5p"], num_devices=64)
    evaluator = Evaluator(table=WorkTable(graph), cluster=cluster)
    request = Request(
        rows=512,
        num_ranks=64,
        replicas=(1,),
        microbatches=microbatches,
        schedules=("1f1b",),
    )
    found = settings_for(request, evaluator)
    return max(setting.num_microbatches for setting in found)


def test_many_microbatches_are_planned_where_they_are_asked_for() -> None:
    graph = gpt(40, 64, 32)
    assert settings_of(graph, None) < 512
    assert settings_of(graph, (512,)) == 512


def test_the_other_planners_run_a_chain() -> None:
    request = Request(rows=32, num_ranks=4, replicas=(1,), schedules=("1f1b",))
    found = best_plan(mmt(2), 4, "40g25u", "spp", request)
    assert {(n, n + 1) for n in range(3)} <= set(found.costs.edges)
