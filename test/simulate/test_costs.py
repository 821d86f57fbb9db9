"""Costs come from a recorded step, or from a model's FLOPs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_xla_pp.graph import Stage, StageEdge, StageGraph
from torch_xla_pp.schedule import gpipe, interleaved_1f1b, one_f_one_b, zbv
from torch_xla_pp.simulate import (
    Costs,
    Flow,
    Link,
    Network,
    estimated_costs,
    measured_costs,
    measured_network,
    simulate,
)
from torch_xla_pp.timeline import Span, Timeline

pytestmark = pytest.mark.pure


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_costs_measured_in_one_schedule_predict_others(data: st.DataObject) -> None:
    times = st.integers(1, 9)
    keys = [(stage, kind) for stage in range(4) for kind in "FIWB"]
    costs = Costs(
        seconds={key: data.draw(times) for key in keys},
        flows=Costs.uniform(4, num_bytes=data.draw(times)).flows,
    )
    network = Network(
        links={
            (0, 1): Link(latency_s=data.draw(times)),
            (1, 0): Link(latency_s=data.draw(times)),
        }
    )
    recorded = [
        simulate(schedule, costs, network)
        for schedule in (interleaved_1f1b(2, 4, 2), zbv(2, 4))
    ]
    found, links = measured_costs(recorded), measured_network(recorded)
    assert found.seconds == pytest.approx(costs.seconds)
    assert links.links == network.links
    for schedule in (interleaved_1f1b(2, 8, 2), zbv(2, 3)):
        expected = simulate(schedule, costs, network)
        predicted = simulate(schedule, found, links)
        assert predicted.step_s == pytest.approx(expected.step_s)


def test_the_sizes_of_messages_are_those_that_were_sent() -> None:
    flows = (
        Flow(producer=0, consumers=(1,), num_bytes=8),
        Flow(producer=0, consumers=(2,), num_bytes=4),
        Flow(producer=1, consumers=(2,), num_bytes=2),
    )
    costs = Costs(seconds=Costs.uniform(3).seconds, flows=flows)
    recorded = [simulate(gpipe(3, 2), costs)]
    assert measured_costs(recorded).flows == flows
    assert measured_costs(recorded, flows[:1]).flows == flows[:1]
    (sent,) = measured_costs([simulate(zbv(1, 1), Costs.uniform(2))]).flows
    assert sent == Flow(producer=0, consumers=(1,), num_bytes=0)


def test_gaps_between_actions_are_charged_and_waiting_is_not() -> None:
    def span(kind: str, start_s: float, end_s: float, waiting_s: float = 0) -> Span:
        return Span(
            rank=0,
            stage=0,
            kind=kind,
            microbatch=0,
            start_s=start_s,
            end_s=end_s,
            waiting_s=waiting_s,
        )

    spans = (span("F", 5, 7), span("B", 10, 14, waiting_s=1))
    found = measured_costs([Timeline(num_ranks=1, spans=spans)])
    assert found.seconds == {(0, "F"): 2, (0, "B"): 6}


def test_costs_are_estimated_from_flops_and_shapes() -> None:
    def edge(producer: int, consumer: int, index: int, **more: object) -> StageEdge:
        return StageEdge(
            producer=producer,
            output=0,
            consumer=consumer,
            input=index,
            shape=(2, 4),
            **{"dtype": torch.float32, **more},  # type: ignore[arg-type]
        )

    graph = StageGraph(
        stages=tuple(Stage(name=f"s{i}", flops=f) for i, f in enumerate((10, 20, 40))),
        edges=(edge(0, 1, 0), edge(0, 2, 0), edge(1, 2, 1, dtype=torch.int64)),
    )
    costs = estimated_costs(graph, flops_per_s=10, num_devices=2)
    assert costs.seconds[2, "F"] == costs.seconds[2, "I"] == costs.seconds[2, "W"] == 2
    assert costs.seconds[0, "B"] == 1
    assert costs.flows == (
        Flow(producer=0, consumers=(1, 2), num_bytes=32),
        Flow(producer=1, consumers=(2,), num_bytes=64, has_gradient=False),
    )
    assert simulate(one_f_one_b(3, 2), costs).step_s > 0


def test_unknown_sizes_are_refused() -> None:
    graph = StageGraph.chain([1])
    with pytest.raises(ValueError, match=r"none for FLOPs of stage 0, FLOPs of stage "):
        estimated_costs(graph, flops_per_s=1)
    with pytest.raises(ValueError, match="measured_costs: expected a timeline"):
        measured_costs([])
