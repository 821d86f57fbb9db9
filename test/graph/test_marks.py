"""Stage marks by data dependency."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph.splitting import Net, example, holders, pairs, split
from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint, pipe_split
from torch.utils.checkpoint import checkpoint

import torch_xla_pp as xpp
from torch_xla_pp import pipeline_yield
from torch_xla_pp.graph.marks import YIELD

pytestmark = pytest.mark.pure


def names(pipe: xpp.Pipe) -> list[str]:
    return [stage.name for stage in pipe.stage_graph.stages]


# The function.


def test_it_returns_what_it_takes() -> None:
    x = torch.ones(2)
    assert pipeline_yield(x, name="a") is x
    tree = {"x": x, "y": [None, 3, (x,)]}
    assert pipeline_yield(tree) is tree
    first, second = pipeline_yield(x, tree)
    assert first is x and second is tree


def test_it_refuses_values_without_tensors() -> None:
    for values in ((), (3, None)):
        with pytest.raises(ValueError, match="at least one tensor, got none"):
            pipeline_yield(*values)


def test_it_composes_with_gradients_vmap_and_checkpoint() -> None:
    x = example().requires_grad_()

    def row(value: Tensor) -> Tensor:
        return pipeline_yield(value.sin()).cos()

    def run(value: Tensor) -> Tensor:
        return torch.vmap(row)(value)

    result = checkpoint(run, x, use_reentrant=False)
    (grad,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(grad, -x.sin().sin() * x.cos())
    jacobian = torch.func.jacrev(row)(x[0].detach())
    torch.testing.assert_close(jacobian.diagonal(), grad[0])


def test_its_operator_is_differentiable_and_batched() -> None:
    x, n = example().requires_grad_(), torch.arange(3)
    out, count = YIELD([x, n], "")
    assert out is not x and torch.equal(count, n)
    (grad,) = torch.autograd.grad((out * 2).sum(), x)
    torch.testing.assert_close(grad, torch.full_like(x, 2))
    batched = torch.vmap(lambda row: YIELD([row, n], "")[0] + 1, in_dims=1)(x)
    torch.testing.assert_close(batched, x.t() + 1)
    torch.library.opcheck(YIELD, ([x, n], "a"))


# Stages.


def test_a_yield_ends_a_stage() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        first = pipeline_yield(net.layers[0](x), name="trunk")
        second = pipeline_yield(net.layers[1](first))
        return net.layers[2](second)

    pipe = split(run)
    assert names(pipe) == ["trunk", "stage_1", "stage_2"]
    assert pipe.stage_graph.is_chain
    assert holders(pipe) == [{"layers.0"}, {"layers.1"}, {"layers.2"}]


def test_early_work_that_is_used_late_lands_late() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        weight, mask = net.layers[3].weight.sin(), torch.ones(4, 4).tril()
        late = net.layers[2](x * 2)
        first = pipeline_yield(net.layers[0](x))
        second = pipeline_yield(net.layers[1](first) + late)
        return second @ weight @ mask

    pipe = split(run)
    assert holders(pipe) == [{"layers.0"}, {"layers.1", "layers.2"}, {"layers.3"}]
    assert pairs(pipe) == "01 12"
    targets = {str(n.target) for n in pipe.get_stage_module(2).graph.nodes}
    assert "aten.tril.default" in targets


def test_what_feeds_no_yield_goes_with_its_operands() -> None:
    def run(net: Net, x: Tensor) -> Any:
        first = net.layers[0](x)
        extra = net.layers[1](first).square().mean()
        second = pipeline_yield(first)
        third = pipeline_yield(net.layers[2](second))
        return net.layers[3](third) + second, extra

    pipe = split(run)
    assert holders(pipe) == [{"layers.0", "layers.1"}, {"layers.2"}, {"layers.3"}]
    assert pairs(pipe) == "01 02 12"


def test_two_branches_are_parallel_stages() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        trunk = pipeline_yield(net.layers[0](x))
        left = pipeline_yield(net.layers[1](trunk))
        right = pipeline_yield(net.layers[2](trunk))
        return net.layers[3](left * right)

    pipe = split(run)
    assert pairs(pipe) == "01 02 13 23"
    assert [pipe.stage_graph.depth(i) for i in range(4)] == [0, 1, 1, 2]


def test_four_branches_that_are_written_in_turns() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        trunk = pipeline_yield(x.sin())
        halves = [layer(trunk) for layer in net.layers]
        ends = [pipeline_yield(half.relu()) for half in halves]
        return torch.stack(ends).sum(0).cos()

    pipe = split(run)
    assert pairs(pipe) == "01 02 03 04 15 25 35 45"
    assert holders(pipe)[1:5] == [{f"layers.{i}"} for i in range(4)]


def test_yields_take_pytrees() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        first = net.layers[0](x)
        tree = pipeline_yield({"h": first, "rest": [first * 2, None, 3]})
        out, mask = pipeline_yield(net.layers[1](tree["h"]), tree["rest"][0] > 0)
        return net.layers[2](out) * mask + tree["rest"][2]

    graph = split(run).stage_graph
    assert [edge.dtype for edge in graph.edges][-1] == torch.bool
    assert graph.num_stages == 3


def test_a_last_yield_makes_no_empty_stage() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        return pipeline_yield(net.layers[1](pipeline_yield(net.layers[0](x))))

    assert names(split(run)) == ["stage_0", "stage_1"]


def test_a_yield_under_vmap_ends_a_stage_of_whole_batches() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        first = net.layers[0](x)
        both = torch.vmap(lambda row, n: pipeline_yield(row * 2 + n).cos() * row.sum())
        return net.layers[1](both(first, torch.arange(3)))

    pipe = split(run)
    assert pairs(pipe) == "01"
    assert holders(pipe) == [{"layers.0"}, {"layers.1"}]


def test_a_yield_under_checkpoint_ends_a_stage() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        def inner(value: Tensor) -> Tensor:
            return net.layers[1](pipeline_yield(net.layers[0](value)))

        return net.layers[2](checkpoint(inner, x, use_reentrant=False))

    assert holders(split(run)) == [{"layers.0"}, {"layers.1", "layers.2"}]


def test_buffers_stay_with_the_ops_that_write_them() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        net.count.add_(1)
        first = pipeline_yield(net.layers[0](x))
        second = pipeline_yield(net.norm(first))
        return net.layers[1](second) * net.count

    assert holders(split(run)) == [{"layers.0"}, {"norm"}, {"layers.1", "count"}]


def test_writes_through_views_keep_their_order() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        first = pipeline_yield(net.layers[0](x))
        key = net.layers[1](first)
        net.count[:2] = key[0, :2].detach()
        second = pipeline_yield(key + net.count)
        third = net.layers[2](second)
        old, view = third + 1, third[:1]
        third.add_(1)
        view.mul_(2)
        return net.layers[3](pipeline_yield(third)) + old

    assert holders(split(run))[1] == {"layers.1", "count"}


def test_a_yielded_value_is_written_in_a_copy() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        first = net.layers[0](x)
        extra = first.mean()
        return net.layers[1](pipeline_yield(first).relu_()) + extra

    assert pairs(split(run)) == "01"


class Block(nn.Module):
    """A stage ends in the middle; what it returns besides is used late."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        late = self.b(x.sin())
        return pipeline_yield(self.a(x)), late


def test_a_module_may_be_cut_and_called_again() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        first, late = net.block(x)
        second = net.layers[0](first).relu()
        third = net.block.a(second + late).relu()
        return net.block.a(net.layers[0](third)) + net.block.b(third)

    net = Net(run)
    net.block = Block()
    pipe = split(net)
    assert pipe.num_stages == 2
    parameters = dict(pipe.get_stage_module(1).named_parameters())
    names = [f"{m}.{p}" for m in ("block.a", "block.b", "layers.0") for p in KINDS]
    assert sorted(parameters) == sorted(names)
    assert pipe.stage_graph.shared_of(1) == {
        f"block.a.{p}": f"block.a.{p}" for p in KINDS
    }


KINDS = ("weight", "bias")


# With other marks.


def test_split_points_cut_the_stages_of_yields_further() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        mask = x.sin()
        second = pipeline_yield(net.layers[1](net.layers[0](x)), name="a")
        third = net.layers[2](second)
        pipe_split()
        return net.layers[3](third * mask)

    cuts = {"layers.1": SplitPoint.BEGINNING, "layers.2": SplitPoint.BEGINNING}
    pipe = split(run, split_spec=cuts)
    assert names(pipe) == ["a.0", "a.1", "stage_2", "stage_3"]
    assert holders(pipe) == [{f"layers.{i}"} for i in range(4)]


def test_a_policy_runs_before_yields_are_looked_at() -> None:
    def policy(traced: fx.GraphModule) -> fx.GraphModule:
        relu = next(n for n in traced.graph.nodes if "relu" in n.name)
        with traced.graph.inserting_before(relu):
            traced.graph.call_function(torch.ops.pippy._pipe_split.default)
        return traced

    def run(net: Net, x: Tensor) -> Tensor:
        first = pipeline_yield(net.layers[0](x))
        return net.layers[1](net.layers[2](first).relu())

    pipe = split(run, split_policy=policy)
    assert holders(pipe) == [{"layers.0"}, {"layers.2"}, {"layers.1"}]


# Faults.


def refused(run: Callable[..., Any], match: str) -> None:
    with pytest.raises(xpp.PlanError, match=match):
        xpp.pipeline(Net(run), mb_args=(example(),))


def test_a_name_is_given_once() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        first = pipeline_yield(net.layers[0](x), name="a")
        return net.layers[1](pipeline_yield(first.sin(), name="a"))

    refused(run, "expected each name once, got 'a' 2 times")


def test_the_result_of_a_yield_is_used() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        first = net.layers[0](x)
        pipeline_yield(first, name="a")
        return net.layers[1](first)

    refused(run, "results of yield 'a' to be used, got none")


def test_a_yield_has_work_before_it() -> None:
    refused(
        lambda net, x: net.layers[0](pipeline_yield(x)),
        "expected yield number 0 to end a stage, got values .* a stage without work",
    )


def test_a_yield_in_a_branch() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        def inner(value: Tensor) -> Tensor:
            return pipeline_yield(net.layers[0](value))

        return torch.cond(x.sum() > 0, inner, net.layers[1], (x,))

    refused(run, r"one inside a branch or body of cond \(cond\)")


def test_a_cycle_through_a_buffer() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        first = pipeline_yield(net.layers[0](x) + net.count)
        second = net.layers[1](first)
        net.count.copy_(second.sum(0))
        return second

    refused(
        run,
        r"cycle, got linear_1 .* needs yield number 0 and .* in place: count\.",
    )
