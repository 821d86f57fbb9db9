"""Forward values are computed again in the backward as the policy or a checkpoint says.

Dropout in the tests has its masks read from what the forward keeps, so that eager can
use the same ones.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from compile.stages import Compiled, close
from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import Function, StageFunctions, export_joint
from torch_xla_pp.compile.checkpoint_regions import marking_checkpoints
from torch_xla_pp.compile.joint_graph import JointGraph
from torch_xla_pp.compile.partition import Remat, partition_joint
from torch_xla_pp.errors import PipelineError

pytestmark = pytest.mark.xla

_aten = torch.ops.aten
ROWS, WIDTH = 4, 8

Call = Callable[[Callable[..., Tensor], Tensor], Tensor]


def plain(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return function(x)


def checkpointed(use_reentrant: bool, **kwargs: Any) -> Call:
    def call(function: Callable[..., Tensor], x: Tensor) -> Tensor:
        result: Tensor = checkpoint(function, x, use_reentrant=use_reentrant, **kwargs)
        return result

    return call


def selective(policy: Any) -> Call:
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpointed(False, context_fn=contexts)


class Block(nn.Module):
    """x → sin → [linear, tanh, linear, dropout, tanh] → linear → tanh."""

    def __init__(self, call: Call = plain, probability: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.call = call
        self.probability = probability

    def inside(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x).tanh())
        if self.probability:
            h = F.dropout(h, self.probability, training=True)
        return h.tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.call(self.inside, x.sin())).tanh()


class Nested(Block):
    def forward(self, x: Tensor) -> Tensor:
        def outer(x: Tensor) -> Tensor:
            return self.call(self.inside, x.cos()).cos()

        return self.last(self.call(outer, x.sin())).tanh()


class Chained(Block):
    """Two regions, the second reads what the first returns."""

    def forward(self, x: Tensor) -> Tensor:
        return self.call(lambda h: self.last(h).tanh(), self.call(self.inside, x))


def export(module: nn.Module) -> JointGraph:
    x = torch.zeros(ROWS, WIDTH, device=xla_compat.device(), requires_grad=True)
    return export_joint(module.to(xla_compat.device()), [x], {})


def cut(module: nn.Module, remat: Remat = "none") -> StageFunctions:
    return partition_joint(export(module), remat)


def ops(names: Iterable[str]) -> list[str]:
    """Return names of values without numbers."""
    return sorted(name.rstrip("_0123456789") for name in names)


def saved(functions: StageFunctions) -> list[str]:
    """Return the ops whose results the forward saves."""
    return ops(set(functions.forward.outputs) - set(functions.outputs))


def count(function: Function | None, *targets: Any) -> int:
    assert function is not None
    return sum(node.target in targets for node in function.module.graph.nodes)


def products(function: Function | None) -> int:
    return count(function, _aten.mm.default, _aten.addmm.default)


def check_against_eager(module: Block, remat: Remat, mesh: Any) -> list[str]:
    """Compare full and split backward with autograd, under the compiled masks.

    Returns:
        The ops whose results are live between forward and backward.
    """
    torch.manual_seed(0)
    x, weight = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    compiled = Compiled(module, [x.clone().requires_grad_()], mesh, remat)
    programs = compiled.programs
    result = compiled.forward([compiled.upload(x)], seed=3)
    masks = [v.cpu() for v in result.live.values() if v.dtype == torch.bool]
    assert len(masks) == (module.probability > 0)

    eager_x = x.clone().requires_grad_()
    eager = module(eager_x) if not masks else masked(module, eager_x, masks[0])
    (eager * weight).sum().backward()
    assert close(result.outputs[0], eager)

    live = {**result.live, "tangent:0": compiled.upload(weight)}
    sums = compiled.zero_sums()
    grads, whole = programs.backward({**compiled.fixed, **sums}, live)
    assert close(grads[0], eager_x.grad)
    grads, residual = programs.backward_input(compiled.fixed, live)
    assert close(grads[0], eager_x.grad)
    sums = compiled.zero_sums()
    split = programs.backward_weight({**compiled.fixed, **sums}, residual)
    for name, parameter in module.named_parameters():
        assert close(whole[f"sum:param:{name}"], parameter.grad), name
        assert close(split[f"sum:param:{name}"], parameter.grad), name
    return ops(result.live)


def masked(module: Block, x: Tensor, mask: Tensor) -> Tensor:
    """Run the block eagerly with a given dropout mask."""
    h = module.second(module.first(x.sin()).tanh())
    h = h * mask / (1.0 - module.probability)
    return module.last(h.tanh()).tanh()


@pytest.mark.parametrize(
    ("call", "remat", "live"),
    [
        (plain, "full", ["ge", "input:"]),
        (
            checkpointed(use_reentrant=False),
            "none",
            ["ge", "input:", "sin", "tanh", "tanh"],
        ),
        (
            checkpointed(use_reentrant=True),
            "none",
            ["ge", "input:", "sin", "tanh", "tanh"],
        ),
    ],
    ids=["full", "checkpoint", "reentrant"],
)
def test_values_and_gradients_equal_eager(
    mesh: Any, call: Call, remat: Remat, live: list[str]
) -> None:
    """Live are the input and the mask; of a checkpoint, its argument, too.

    The two tanh are the result of the region and that of the stage, which layers
    outside of the region read in their backward.
    """
    assert check_against_eager(Block(call, probability=0.25), remat, mesh) == live


def test_without_remat_all_that_the_backward_reads_is_saved(mesh: Any) -> None:
    assert saved(cut(Block())) == ["sin", "tanh", "tanh"]


class Parts(nn.Module):
    """A backward that reads parts of one value, cut in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value = self.linear(x)
        first, second = value.chunk(2, -1)
        third, fourth = value.unflatten(-1, (2, -1)).unbind(-2)
        fifth, sixth = value.split([WIDTH, WIDTH], -1)
        return first.sin() + second.cos() + third.tan() * fourth + fifth * sixth


def test_a_value_is_saved_whole_if_parts_of_it_are_read(mesh: Any) -> None:
    assert saved(cut(Parts())) == ["addmm", "tan"]


def test_full_saves_nothing_of_a_block_without_dropout(mesh: Any) -> None:
    assert saved(cut(Block(), "full")) == []


def test_results_of_given_ops_are_saved(mesh: Any) -> None:
    functions = cut(Block(), [_aten.addmm.default])
    assert saved(functions) == ["addmm", "addmm", "addmm"]
    assert count(functions.backward, _aten.addmm.default) == 0


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("block", [Block, Nested])
def test_of_a_region_only_what_is_read_outside_is_saved(
    mesh: Any, block: type[Block], use_reentrant: bool
) -> None:
    """The last linear layer, outside, reads the result of the region."""
    functions = cut(block(checkpointed(use_reentrant)))
    result = "cos" if block is Nested else "tanh"
    assert saved(functions) == sorted(["sin", result])


def test_the_inputs_of_each_of_two_chained_regions_are_saved(mesh: Any) -> None:
    functions = cut(Chained(checkpointed(use_reentrant=False)))
    assert saved(functions) == ["tanh"]
    assert "input:0" in functions.backward.inputs  # type: ignore[union-attr]


def save_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op is _aten.addmm.default
    return CheckpointPolicy[f"PREFER_{'SAVE' if is_product else 'RECOMPUTE'}"]


@pytest.mark.parametrize("policy", [[_aten.addmm.default], save_products])
def test_selective_checkpoints_save_what_they_select(mesh: Any, policy: Any) -> None:
    """But not the second product: nothing reads it as the tanh of it is saved."""
    functions = cut(Block(selective(policy)))
    assert saved(functions) == ["addmm", "sin", "tanh"]
    assert count(functions.backward, _aten.addmm.default) == 0


def test_other_contexts_of_a_checkpoint_are_refused(mesh: Any) -> None:
    contexts = torch.no_grad(), torch.no_grad()
    call = checkpointed(use_reentrant=False, context_fn=lambda: contexts)
    with pytest.raises(PipelineError, match="expected a context_fn .* got .* no_grad"):
        export(Block(call))


@pytest.mark.parametrize(
    ("call", "remat", "repeated"),
    [
        (plain, "none", 0),
        (plain, "full", 3),
        (checkpointed(use_reentrant=False), "none", 2),
    ],
    ids=["none", "full", "checkpoint"],
)
def test_a_split_backward_does_the_work_of_a_full_one(
    mesh: Any, call: Call, remat: Remat, repeated: int
) -> None:
    """The backward weight has a matrix product per weight and no other."""
    functions = cut(Block(call), remat)
    parts = functions.backward_input, functions.backward_weight
    assert products(functions.backward) == products(parts[0]) + products(parts[1])
    assert products(functions.backward_weight) == 3
    assert products(functions.backward_input) <= 3 + repeated
    for op in (_aten.tanh.default, _aten.sin.default, _aten.rand_like.default):
        assert count(parts[1], op) == 0


class Updating(nn.Module):
    """A scale by a buffer that is then updated."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        h = (self.scale.view(1, -1) * 1.0 * x).sin()
        self.scale.mul_(3.0)  # type: ignore[operator]
        return h


def test_what_is_made_of_an_updated_buffer_is_saved(mesh: Any) -> None:
    ones = torch.ones(ROWS, WIDTH, requires_grad=True)
    compiled = Compiled(Updating(), [ones], mesh, "full")
    result = compiled.forward([compiled.upload(ones)])
    compiled.fixed.update(result.updates)
    result.live["tangent:0"] = compiled.upload(ones)
    grads, _ = compiled.programs.backward(compiled.fixed, result.live)
    assert close(grads[0], 2 * (2 * torch.ones(ROWS, WIDTH)).cos())  # type: ignore[arg-type]


class CrossedDropouts(nn.Module):
    """The first of two masks is used last."""

    def forward(self, x: Tensor) -> Tensor:
        first = F.dropout(x, 0.1, training=True)
        second = F.dropout(x, 0.9, training=True)
        return second.sin() * 2 + first


def random_nodes(graph: fx.Graph) -> list[str]:
    return [n.name for n in graph.nodes if n.target is _aten.rand_like.default]


@pytest.mark.parametrize("remat", ["none", "full"])
def test_random_numbers_are_drawn_in_the_order_of_the_module(
    mesh: Any, remat: Remat
) -> None:
    joint = export(CrossedDropouts())
    functions = partition_joint(joint, remat)
    expected = random_nodes(joint.graph.graph)
    assert len(expected) == 2
    for function in (functions.forward, functions.inference):
        assert random_nodes(function.module.graph) == expected
    assert functions.backward is not None
    assert random_nodes(functions.backward.module.graph) == []


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_marks_outlive_a_trace_by_torch_export(mesh: Any, use_reentrant: bool) -> None:
    """Without marks, the results of cos and tanh would be saved, too."""
    module = Nested(checkpointed(use_reentrant))
    x = torch.zeros(ROWS, WIDTH)
    with marking_checkpoints():
        pipe = pipeline(module, (x,), split_spec={"last": SplitPoint.BEGINNING})
    assert saved(cut(pipe.get_stage_module(0))) == ["sin"]


def test_a_selective_checkpoint_cannot_be_exported(mesh: Any) -> None:
    module = Block(selective([_aten.addmm.default]))
    with pytest.raises(PipelineError, match="got a context_fn in a model that is"):
        with marking_checkpoints():
            torch.export.export(module, (torch.zeros(ROWS, WIDTH),), strict=True)


@pytest.mark.parametrize(
    ("remat", "got"),
    [
        ("some", "'full' or a collection of op overloads, got 'some'"),
        (3, "'full' or a collection of op overloads, got 3"),
        ([_aten.mm, _aten.mm.default], r"expected op overloads, got .*aten\.mm'?.*>\."),
    ],
)
def test_a_bad_policy_is_refused(mesh: Any, remat: Any, got: str) -> None:
    with pytest.raises(ValueError, match=got):
        cut(Block(), remat)
