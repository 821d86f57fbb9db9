"""The graph of stages: its queries, its checks, its texts."""

import pytest
import torch

from torch_xla_pp.errors import PlanError
from torch_xla_pp.graph import (
    SharedParameter,
    Source,
    Stage,
    StageEdge,
    StageGraph,
    StageValue,
)

pytestmark = pytest.mark.pure

DIAMOND = StageGraph.from_sources(
    [[], [Source(0)], [Source(0)], [Source(1, 0), Source(2)]]
)


def stages(count: int) -> tuple[Stage, ...]:
    return tuple(Stage(name=f"part{i}") for i in range(count))


def edge(producer: int, consumer: int, position: int = 0) -> StageEdge:
    return StageEdge(producer=producer, output=0, consumer=consumer, input=position)


def test_a_chain_sends_everything_to_the_next_stage() -> None:
    graph = StageGraph.chain((1, 2))
    assert graph.is_chain
    assert graph.sources(2) == (Source(1, 0), Source(1, 1))
    assert graph.outputs_sent(1) == (0, 1)
    assert graph.outputs_sent(2) == ()


def test_a_diamond_has_parallel_branches() -> None:
    assert not DIAMOND.is_chain
    assert DIAMOND.pairs == {(0, 1), (0, 2), (1, 3), (2, 3)}
    assert DIAMOND.producers(3) == (1, 2)
    assert DIAMOND.consumers(0) == (1, 2)
    assert [DIAMOND.depth(i) for i in range(4)] == [0, 1, 1, 2]
    assert [DIAMOND.height(i) for i in range(4)] == [2, 1, 1, 0]


def test_sources_round_trip() -> None:
    assert DIAMOND.sources(0) == ()
    assert DIAMOND.sources(3) == (Source(1, 0), Source(2))
    sources = [DIAMOND.sources(i) for i in range(4)]
    assert StageGraph.from_sources(sources) == DIAMOND


def test_sources_follow_the_order_of_inputs_not_of_edges() -> None:
    edges = (edge(0, 1, 1), edge(0, 2), edge(0, 1), edge(1, 2, 1))
    graph = StageGraph(stages=stages(3), edges=edges)
    assert graph.sources(2) == (Source(0, 0), Source(1, 0))


def test_a_value_of_several_consumers_has_several_edges() -> None:
    assert DIAMOND.outputs_sent(0) == (0, 0)


def test_shared_parameters_are_found_by_stage() -> None:
    shared = SharedParameter(group="embed", names=((0, "embed"), (2, "head")))
    graph = StageGraph(
        stages=stages(3), edges=StageGraph.chain((1, 1)).edges, shared=(shared,)
    )
    assert shared.stages == (0, 2)
    assert graph.shared_of(0) == {"embed": "embed"}
    assert graph.shared_of(1) == {}
    assert graph.shared_of(2) == {"head": "embed"}
    assert "shared embed: embed in stage 0, head in stage 2" in str(graph)


def test_bytes_are_unknown_without_a_type() -> None:
    assert edge(0, 1).bytes is None
    typed = StageEdge(
        producer=0, output=0, consumer=1, input=0, shape=(2, 3), dtype=torch.bfloat16
    )
    assert typed.bytes == 12


def test_the_text_shows_stages_and_edges() -> None:
    first = Stage(
        name="embed",
        inputs=(StageValue(name="ids", shape=(2, 8), dtype=torch.int64),),
        outputs=(StageValue(name="h", shape=(2, 8, 1024), dtype=torch.float32),),
        is_bare=True,
        num_parameters=1_500_000,
        parameter_bytes=6_000_000,
        flops=12,
    )
    h = StageEdge(
        producer=0,
        output=0,
        consumer=1,
        input=0,
        shape=(2, 8, 1024),
        dtype=torch.float32,
        sharding="{devices=[2,1,1]0,1}",
    )
    graph = StageGraph(stages=(first, Stage(name="head")), edges=(h,))
    assert str(graph).splitlines() == [
        "2 stages",
        "  0 embed: 1.5M parameters (5.7 MiB), 12 FLOPs",
        "      in  ids int64[2, 8]",
        "      out h float32[2, 8, 1024]",
        "  1 head",
        "  0.out0 -> 1.in0  float32[2, 8, 1024]  64.0 KiB  {devices=[2,1,1]0,1}",
    ]
    assert graph.to_dot().splitlines() == [
        "digraph stages {",
        "  node [shape=box];",
        '  0 [label="0 embed\\n1.5M parameters (5.7 MiB)\\n12 FLOPs"];',
        '  1 [label="1 head"];',
        '  0 -> 1 [label="float32[2, 8, 1024]\\n64.0 KiB"];',
        "}",
    ]


def test_a_cycle_is_refused() -> None:
    with pytest.raises(PlanError, match="without a cycle, got 1 -> 2 -> 1"):
        StageGraph.from_sources([[], [Source(0, 0), Source(2, 0)], [Source(1, 0)]])


def test_a_stage_cannot_take_from_a_later_one() -> None:
    with pytest.raises(PlanError, match="of earlier ones only, got 2 -> 1"):
        StageGraph.from_sources([[], [Source(2, 0)], [Source(0, 0)]])


def test_a_source_must_exist() -> None:
    with pytest.raises(PlanError, match=r"expected stages 0..1, got edges 4 -> 1"):
        StageGraph.from_sources([[], [Source(0, 0), Source(4, 0)]])


def test_stages_without_inputs_or_consumers_are_all_named() -> None:
    with pytest.raises(PlanError) as error:
        StageGraph.from_sources([[], [Source(0, 0)], []])
    assert "stage 2 (stage_2) takes nothing" in str(error.value)
    assert "stage 1 (stage_1) is used by none" in str(error.value)


def test_an_input_without_source_is_refused() -> None:
    with pytest.raises(PlanError, match=r"1 part1: expected one edge for each input"):
        StageGraph(stages=stages(2), edges=(edge(0, 1, 0), edge(0, 1, 2)))
