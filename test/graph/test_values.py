"""Values that cross between any two stages."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from graph.splitting import Net, example, holders, pairs, run_stages, split
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipe_split

import torch_xla_pp as xpp
from torch_xla_pp.graph import Source, check_split_spec

pytestmark = pytest.mark.pure

CUT = {f"layers.{i}": SplitPoint.BEGINNING for i in (1, 2)}


def test_a_chain_goes_from_neighbour_to_neighbour() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        a, b, c, _ = net.layers
        return c(b(a(x)))

    graph = split(run, split_spec=CUT).stage_graph
    assert graph.is_chain
    assert [graph.sources(i) for i in range(3)] == [(), (Source(0),), (Source(1),)]
    stage = graph.stages[1]
    assert (stage.num_parameters, stage.parameter_bytes) == (20, 80)
    assert stage.flops == 2 * 3 * 4 * 4
    assert graph.edges[0].bytes == 48


def test_a_value_may_skip_stages() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        a, b, c, _ = net.layers
        first = a(x)
        return c(b(first)) + first

    pipe = split(run, split_spec=CUT)
    assert pairs(pipe) == "01 02 12"
    assert pipe.stage_graph.outputs_sent(0) == (0, 0)


def test_several_values_of_any_dtype_cross_a_boundary() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        a, b, c, _ = net.layers
        first = a(x)
        order, sign, double = first.argsort(), first > 0, first.double()
        pipe_split()
        second = b(first).gather(1, order) * sign
        pipe_split()
        return c(second + double.float()) * sign

    graph = split(run).stage_graph
    assert {str(e.dtype) for e in graph.edges if e.consumer == 1} == {
        "torch.int64",
        "torch.bool",
        "torch.float32",
    }
    assert len(graph.sources(2)) == 3


def test_a_value_that_nothing_uses_is_not_sent() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        largest, _place = net.layers[0](x).max(1)
        pipe_split()
        return net.layers[1](largest.expand(4, 3).t())

    assert len(split(run).stage_graph.sources(1)) == 1


def test_items_of_a_list_are_taken_where_it_is_made() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        halves = net.layers[0](x).chunk(2, 1)
        pipe_split()
        return net.layers[1](torch.cat([halves[1], halves[0]], 1))

    assert len(split(run).stage_graph.sources(1)) == 2


def test_constants_are_computed_where_they_are_used() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        mask = torch.ones(4, 4).tril() * torch.tensor([1.0, 2, 3, 4]) + net.count
        noise = torch.rand(4) * 0
        for layer in net.layers[:3]:
            x = layer(x) @ mask + noise
        return x

    graph = split(run, split_spec=CUT).stage_graph
    assert [e.shape for e in graph.edges if e.consumer == 2] == [(3, 4), (4,)]


def test_inputs_of_later_stages_come_through_the_first() -> None:
    def run(
        net: Net, x: Tensor, unused: Any, mask: Any = None, more: Any = None
    ) -> Any:
        a, b, c, _ = net.layers
        return c(b(a(x)) * mask["keep"]) + more[0] + x

    x, keep = example(), example() > 0
    kwargs = {"mask": {"keep": keep, "other": keep}, "more": [x + 1]}
    pipe = split(Net(run), x, x + 2, kwargs=kwargs, split_spec=CUT)
    assert pairs(pipe) == "01 02 12"
    first = pipe.stage_graph.stages[0]
    assert len(first.inputs) == 5
    stage = pipe.get_stage_module(0)
    assert len(stage(x, x, more=[x], mask={"other": keep, "keep": keep})) == 4
    with pytest.raises(TypeError, match="mask"):
        stage(x, x, more=[x])


def test_an_input_that_is_no_tensor_stays_outside() -> None:
    def run(net: Net, x: Tensor, scale: float, flag: Any = None) -> Tensor:
        return net.layers[1](net.layers[0](x) * scale) if flag is None else x

    pipe = split(Net(run), example(), 2.0, kwargs={"flag": None}, split_spec=CUT_ONE)
    assert pairs(pipe) == "01"


CUT_ONE = {"layers.1": SplitPoint.BEGINNING}


class Answer(NamedTuple):
    loss: Tensor
    hidden: Any


def test_the_last_stage_returns_what_the_model_returns() -> None:
    def run(net: Net, x: Tensor) -> Any:
        first = net.layers[0](x)
        last = net.layers[1](first)
        return {"b": last, "a": (first, 3, None), "x": [x, last]}

    pipe = split(run, split_spec=CUT_ONE)
    assert len(pipe(example())) == 6
    assert [v.name for v in pipe.stage_graph.stages[1].outputs][2:4] == ["3", "None"]


def test_named_tuples_and_parameters_may_be_returned() -> None:
    def run(net: Net, x: Tensor) -> Any:
        first = net.layers[0](x)
        return Answer(net.layers[1](first).sum(), (first, net.layers[0].weight))

    pipe = split(run, split_spec=CUT_ONE)
    assert pipe.stage_graph.stages[1].inputs[0].shape == (3, 4)
    assert pipe.stage_graph.shared_of(1) == {"layers.0.weight": "layers.0.weight"}


@dataclass
class Result:
    logits: Tensor
    hidden: Tensor


torch.export.register_dataclass(Result, serialized_type_name="test_values.Result")


def test_a_registered_class_is_returned_as_it_is() -> None:
    def run(net: Net, x: Tensor) -> Result:
        first = net.layers[0](x)
        return Result(logits=net.layers[1](first), hidden=first)

    pipe = xpp.pipeline(Net(run), mb_args=(example(),), split_spec=CUT_ONE)
    result, expected = run_stages(pipe, example()), Net(run)(example())
    assert isinstance(result, Result)
    torch.testing.assert_close(result.logits, expected.logits)
    torch.testing.assert_close(result.hidden, expected.hidden)


def test_a_model_of_one_stage() -> None:
    def run(net: Net, x: Tensor, scale: Tensor) -> Any:
        return {"y": net.layers[0](x) * scale, "x": x}

    x = example()
    graph = split(Net(run), x, kwargs={"scale": x}).stage_graph
    assert (graph.num_stages, graph.edges, graph.sources(0)) == (1, (), ())


def test_a_model_that_computes_nothing_is_one_stage() -> None:
    assert split(lambda net, x: {"x": x, "n": None}).num_stages == 1


def test_a_split_leaves_the_model_as_it_was() -> None:
    net = Net(lambda net, x: net.layers[1](net.layers[0](x)))
    for _ in range(2):
        split(net, split_spec=CUT_ONE)
    assert "forward" not in vars(net.layers[1])


def test_blocks_without_gradients_are_split_like_others() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        first = net.layers[0](x)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            angle = first.sin()
            second = net.layers[1](angle)
        return net.layers[2](first) + second * angle

    assert pairs(split(run, split_spec=CUT)) == "01 02 12"


def test_a_received_value_is_written_in_a_copy() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        first = net.layers[0](x.mul_(2))
        pipe_split()
        rows = first[:1]
        rows.add_(1)
        return net.layers[1](first.relu_()) + x

    assert pairs(split(run)) == "01"


def test_what_is_sent_has_all_writes_in_it() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        first = net.layers[0](x)
        first[:1].mul_(2)
        pipe_split()
        return net.layers[1](first)

    split(run)


def tied(first: int, second: int) -> Net:
    net = Net(lambda net, x: net.layers[1](net.layers[0](x).relu()))
    net.layers[second].weight = net.layers[first].weight
    return net


def test_tied_parameters_are_recorded_by_group() -> None:
    net = tied(0, 1)
    pipe = split(net, split_spec=CUT_ONE)
    (shared,) = pipe.stage_graph.shared
    assert str(shared) == (
        "layers.0.weight: layers.0.weight in stage 0, layers.1.weight in stage 1"
    )
    copies = [
        pipe.get_stage_module(stage).get_parameter(name) for stage, name in shared.names
    ]
    # Each rank's stage has the model's own parameter.
    assert all(copy is net.layers[0].weight for copy in copies)
    assert net.layers[0].weight is net.layers[1].weight


def test_a_module_of_two_stages_is_recorded_too() -> None:
    net = Net(lambda net, x: net.layers[0](x))
    net.run = lambda net, x: (h := net.layers[0](x), pipe_split(), net.layers[0](h))[2]
    pipe = split(net)
    names = ("layers.0.weight", "layers.0.bias")
    assert pipe.stage_graph.shared_of(1) == dict(zip(names, names, strict=True))


def test_a_tied_parameter_within_a_stage_is_one() -> None:
    net = tied(0, 1)
    pipe = split(net)
    assert pipe.stage_graph.shared == ()
    parameters = dict(pipe.get_stage_module(0).named_parameters())
    assert any(p is net.layers[0].weight for p in parameters.values())
    assert pipe.stage_graph.stages[0].num_parameters == 24


def test_parameters_go_to_the_stages_that_use_them() -> None:
    net = Net(lambda net, x: net.layers[1](net.norm(net.layers[0](x))))
    pipe = split(net, split_spec=CUT_ONE)
    assert holders(pipe) == [{"layers.0", "norm"}, {"layers.1"}]


# Faults.


def refused(run: Any, match: str, **options: Any) -> None:
    with pytest.raises(xpp.PlanError, match=match):
        xpp.pipeline(Net(run), mb_args=(example(),), **options)


def test_a_number_cannot_cross() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        first = net.layers[0](x)
        total = first.sum().item()
        pipe_split()
        return net.layers[1](first) * total

    where = r"item \(File .*, in run\) of stage 0 is read by stage 1 at mul"
    refused(run, where + r".* got SymFloat, which cannot cross")


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        ({"layers.0": SplitPoint.BEGINNING}, "before the first"),
        ({"layers.1": SplitPoint.END}, "after the last"),
    ],
)
def test_a_split_point_without_work_on_one_side(
    spec: dict[str, SplitPoint], where: str
) -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        return net.layers[1](net.layers[0](x))

    refused(run, f"both sides of every split point, got one {where}", split_spec=spec)


def test_two_split_points_at_one_place_are_one() -> None:
    spec = {"layers.0": SplitPoint.END, "layers.1": SplitPoint.BEGINNING}
    pipe = split(lambda net, x: net.layers[1](net.layers[0](x)), split_spec=spec)
    assert pipe.num_stages == 2


def test_a_stage_without_inputs() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        first = net.layers[0](x)
        pipe_split()
        weight = net.layers[1].weight.sin()
        pipe_split()
        return first @ weight

    refused(run, r"stage 1 \(stage_1\) takes nothing: expected a value of an earlier")


def test_a_stage_whose_values_nobody_uses() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        first = net.layers[0](x)
        pipe_split()
        net.count.add_(first.sum(0))
        pipe_split()
        return net.layers[1](first)

    refused(run, r"stage 1 \(stage_1\) is used by none: expected a later stage")


def test_a_buffer_that_is_written_in_another_stage() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        first = net.layers[0](x) + net.count
        pipe_split()
        second = net.layers[1](first)
        net.count.copy_(second.sum(0))
        return second

    refused(run, r"buffer count, .*stage 0 at add .*stage 1 at copy_ .*in a cycle")


def test_a_received_value_that_is_written_and_used_later() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        first = net.layers[0](x)
        pipe_split()
        first[:1].mul_(2)
        second = net.layers[1](first)
        pipe_split()
        return second + first

    refused(run, r"tensor linear .*stage 1 at mul_ .*stage 2 at add ")


def test_control_flow_is_refused() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, net.layers[0], net.layers[1], (x,))

    refused(run, r"cond \(cond\) is control flow: expected operations on tensors")


def test_unknown_split_points_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"unknown \['layer.1', 'head'\].*layers.2"):
        check_split_spec(Net(nn.Identity()), {"layer.1": 0, "layers.1": 0, "head": 0})
