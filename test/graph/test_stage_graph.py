"""Stage graphs, read from really traced and split models."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipeline

from torch_xla_pp.errors import PlanError
from torch_xla_pp.graph import StageEdge, StageGraph, check_split_spec

pytestmark = pytest.mark.pure


class Chain(nn.Module):
    """Three layers, joined as `forward` says."""

    def __init__(self, join: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, *self.layers)


def split(join: Callable[..., Tensor]) -> Pipe:
    spec = {f"layers.{i}": SplitPoint.BEGINNING for i in (1, 2)}
    return pipeline(Chain(join), mb_args=(torch.ones(2, 4),), split_spec=spec)


def test_a_chain_has_an_edge_between_neighbours() -> None:
    graph = StageGraph.from_split(split(lambda x, a, b, c: c(b(a(x)))).split_gm)
    assert graph == StageGraph.chain((1, 1))
    assert graph.outputs_sent(0) == (0,)
    assert graph.outputs_sent(2) == ()
    assert str(graph) == "3 stages\n  0.out0 -> 1.in0\n  1.out0 -> 2.in0"


def test_several_values_cross_a_boundary_in_the_consumers_order() -> None:
    def join(x: Tensor, a: nn.Module, b: nn.Module, c: nn.Module) -> Tensor:
        first = a(x)
        second = first.sin()
        third = b(second) + first
        return c(third)

    graph = StageGraph.from_split(split(join).split_gm)
    crossing = [edge for edge in graph.edges if edge.consumer == 1]
    assert sorted(edge.output for edge in crossing) == [0, 1]
    assert [edge.input for edge in crossing] == [0, 1]


def test_a_value_that_skips_a_stage_is_refused() -> None:
    pipe = split(lambda x, a, b, c: (h := a(x)) * 0 + c(b(h)) + h)
    with pytest.raises(PlanError, match=r"edges between other stages: 0.out\d -> 2"):
        StageGraph.from_split(pipe.split_gm)


def test_an_input_of_a_later_stage_is_refused() -> None:
    pipe = split(lambda x, a, b, c: c(b(a(x)) + x))
    with pytest.raises(PlanError, match="stage 1 reads the model's input x"):
        StageGraph.from_split(pipe.split_gm)


def test_edges_print_as_arrows() -> None:
    edge = StageEdge(producer=1, output=0, consumer=2, input=3)
    assert str(edge) == "1.out0 -> 2.in3"


def test_unknown_split_points_are_all_named() -> None:
    model = Chain(lambda x, *layers: x)
    with pytest.raises(ValueError, match=r"unknown \['layer.1', 'head'\].*layers.2"):
        check_split_spec(model, {"layer.1": 0, "layers.1": 0, "head": 0})
