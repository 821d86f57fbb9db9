"""Stages that are given by the names of ops, as a plan does."""

import pytest
import torch
from graph.splitting import Net, example
from torch import Tensor, fx
from torch.distributed.pipelining import pipe_split

from torch_xla_pp.errors import PlanError
from torch_xla_pp.graph import GivenStages, prepare

pytestmark = pytest.mark.pure

MARK = torch.ops.pippy._pipe_split.default


def two_branches(net: Net, x: Tensor) -> Tensor:
    a, b, c, _ = net.layers
    left = a(x).relu()
    pipe_split()
    right = b(x).tanh()
    return c(left + right)


def written(net: Net, x: Tensor) -> Tensor:
    first = net.layers[0](x)
    turned = first.t()
    first.mul_(2)
    return net.layers[1](first) + turned.sum()


def traced(run: object) -> fx.GraphModule:
    net = Net(run)  # type: ignore[arg-type]
    return torch.export.export(net, (example(),)).module(check_guards=False)


def given(*stages: str) -> GivenStages:
    """Return stages from the names of their ops."""
    names = tuple(f"part {i}" for i in range(len(stages)))
    places = {op: i for i, ops in enumerate(stages) for op in ops.split()}
    return GivenStages(names=names, stages=places)


def cut(module: fx.GraphModule) -> list[str]:
    """Return the names of the ops between marks, without carried values."""
    ops: list[list[str]] = [[]]
    for node in module.graph.nodes:
        if node.target is MARK:
            ops.append([])
        elif getattr(node.target, "__name__", "") not in ("carry", ""):
            if node.op == "call_function":
                ops[-1].append(node.name)
    return [" ".join(names) for names in ops]


def test_stages_need_not_follow_the_order_of_the_program_or_its_marks() -> None:
    module = traced(two_branches)
    stages = given("linear_1 tanh", "linear relu", "add linear_2")
    prepared = prepare(module, MARK, stages)
    assert prepared.names == ("part 0", "part 1", "part 2")
    assert cut(module) == ["linear_1 tanh", "linear relu", "add linear_2"]


def test_another_models_stages_are_refused_with_the_first_op_that_differs() -> None:
    stages = given("linear cosh", "linear_1 tanh add linear_2")
    text = r"expected the 6 operations .* got 6; .* relu \(File .* no cosh, which"
    with pytest.raises(PlanError, match=text):
        prepare(traced(two_branches), MARK, stages)


def test_given_stages_are_checked_as_others_are() -> None:
    with pytest.raises(PlanError, match="written in place, to be used by one stage"):
        prepare(traced(written), MARK, given("linear t", "mul_ sum_1 linear_1 add"))
    backward = given("linear relu add linear_2", "linear_1 tanh")
    with pytest.raises(PlanError, match="without a cycle"):
        prepare(traced(two_branches), MARK, backward)
