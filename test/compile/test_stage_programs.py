"""Programs of a stage compute what eager does, whatever the module holds."""

import copy
from typing import Any

import pytest
import torch
from compile.stages import Compiled, close
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn import functional as F

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import export_joint
from torch_xla_pp.errors import PipelineError

pytestmark = pytest.mark.xla


class Everything(nn.Module):
    """Batch norm, attention, tied and unused weights, constants, aliased outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 8)
        self.left = nn.Linear(8, 8, bias=False)
        self.right = nn.Linear(8, 8, bias=False)
        self.right.weight = self.left.weight
        self.unused = nn.Linear(2, 2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("offset", torch.arange(8.0))

    def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        h = self.second(self.norm(self.first(x)).relu()) + self.offset
        h = h + torch.arange(8, device=x.device)
        h = h + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8], device=x.device)
        h = self.right(F.gelu(self.left(h)))
        h = h + self.attention(h[None], h[None], h[None])[0][0]
        return h, index + 1, x, h.t()


def run_eager(
    module: nn.Module, x: Tensor, index: Tensor, weights: list[Tensor]
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    x = x.clone().requires_grad_()
    outputs = module(x, index)
    h, _, same, turned = outputs
    loss = (h * weights[0]).sum() + (same * weights[1]).sum()
    (loss + (turned * weights[2]).sum()).backward()
    return outputs, x.grad


def test_full_and_split_backward_equal_eager(mesh: Any) -> None:
    torch.manual_seed(0)
    eager = Everything()
    index = torch.zeros(4, dtype=torch.int64)
    compiled = Compiled(eager, [torch.zeros(4, 8, requires_grad=True), index], mesh)
    programs = compiled.programs
    whole, split = compiled.zero_sums(), compiled.zero_sums()
    for _ in range(3):
        x = torch.randn(4, 8)
        weights = [torch.randn(4, 8), torch.randn(4, 8), torch.randn(8, 4)]
        outputs, grad = run_eager(eager, x, index, weights)
        inputs = [compiled.upload(x), compiled.upload(index)]
        result = compiled.forward(inputs)
        compiled.fixed.update(result.updates)
        for got, expected in zip(result.outputs.values(), outputs, strict=True):
            assert close(got, expected)
        for i, weight in zip((0, 2, 3), weights, strict=True):
            result.live[f"tangent:{i}"] = compiled.upload(weight)
        grads, whole = programs.backward({**compiled.fixed, **whole}, result.live)
        assert close(grads[0], grad)
        assert grads[1] is None
        grads, residual = programs.backward_input(compiled.fixed, result.live)
        assert close(grads[0], grad)
        split = programs.backward_weight({**compiled.fixed, **split}, residual)
    for name, parameter in eager.named_parameters():
        if name.startswith("unused"):
            assert f"sum:param:{name}" not in whole
        else:
            assert close(whole[f"sum:param:{name}"], parameter.grad), name
            assert close(split[f"sum:param:{name}"], parameter.grad), name
    for name, buffer in eager.named_buffers():
        assert close(compiled.fixed[f"buffer:{name}"], buffer), name


def test_no_parameter_or_input_is_an_output_of_the_forward(mesh: Any) -> None:
    compiled = Compiled(nn.Linear(8, 8), [torch.zeros(4, 8, requires_grad=True)], mesh)
    forward = compiled.programs._programs["forward"].spec.function
    assert len(forward.outputs) == 1
    assert not set(forward.outputs) & set(forward.inputs)


def test_gradient_sums_keep_the_sharding_of_their_parameter(mesh: Any) -> None:
    compiled = Compiled(nn.Linear(8, 8), [torch.zeros(4, 8, requires_grad=True)], mesh)
    x = torch.randn(4, 8)
    result = compiled.forward([compiled.upload(x)], 0)
    result.live["tangent:0"] = compiled.upload(x)
    fixed = {**compiled.fixed, **compiled.zero_sums()}
    grads, sums = compiled.programs.backward(fixed, result.live)
    texts = xla_compat.sharding_texts([*sums.values(), grads[0]])
    assert texts == ["{replicated}", "{replicated}", "{devices=[2,1]0,1}"]


def test_sums_are_added_up_in_place_and_begin_with_a_copy_of_grad(mesh: Any) -> None:
    compiled = Compiled(nn.Linear(8, 8), [torch.zeros(4, 8, requires_grad=True)], mesh)
    programs, role = compiled.programs, "param:weight"
    x, ones = torch.randn(4, 8), torch.ones(4, 8)
    grad = compiled.upload(torch.full((8, 8), 2.0), compiled.whole)
    sums = compiled.sum_programs.start(compiled.fixed, {role: grad})
    assert torch.equal(sums["sum:param:bias"].cpu(), torch.zeros(8))
    first = dict(sums)
    for _ in range(2):
        result = compiled.forward([compiled.upload(x)])
        result.live["tangent:0"] = compiled.upload(ones)
        _, sums = programs.backward({**compiled.fixed, **sums}, result.live)
    assert close(sums["sum:" + role], 2.0 + 2 * ones.t() @ x)
    assert torch.equal(grad.cpu(), torch.full((8, 8), 2.0))
    for value in first.values():
        with pytest.raises(RuntimeError, match="Trying to access XLA data"):
            value.cpu()


class Dropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.2, training=True)


def dropped(compiled: Compiled, seed: int) -> tuple[Tensor, Tensor]:
    """Return output and input gradient for ones."""
    ones = compiled.upload(torch.ones(64, 64))
    result = compiled.forward([ones], seed)
    result.live["tangent:0"] = ones
    grads, _ = compiled.programs.backward(compiled.fixed, result.live)
    assert grads[0] is not None
    return result.outputs[0].cpu(), grads[0].cpu()


def test_dropout_keeps_the_mean_and_its_gradient_the_mask(mesh: Any) -> None:
    compiled = Compiled(Dropping(), [torch.ones(64, 64, requires_grad=True)], mesh)
    output, grad = dropped(compiled, seed=1)
    assert set(output.unique().tolist()) == {0.0, 1.25}
    assert abs(output.mean() - 1.0) < 0.05
    assert torch.equal(output, grad)


def test_dropout_masks_follow_the_seed_and_nothing_else(mesh: Any) -> None:
    compiled = Compiled(Dropping(), [torch.ones(64, 64, requires_grad=True)], mesh)
    first, again, other = (dropped(compiled, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_dropout_masks_do_not_depend_on_random_work_before_the_trace(
    mesh: Any,
) -> None:
    example = [torch.ones(64, 64, requires_grad=True)]
    first = dropped(Compiled(Dropping(), example, mesh), seed=1)[0]
    pending = torch.rand(3, device=xla_compat.device())
    second = dropped(Compiled(Dropping(), example, mesh), seed=1)[0]
    assert torch.equal(first, second)
    assert pending.cpu().unique().numel() == 3


def test_training_mode_is_part_of_the_trace(mesh: Any) -> None:
    module = nn.Dropout(0.5).eval()
    compiled = Compiled(module, [torch.ones(4, 8, requires_grad=True)], mesh)
    result = compiled.programs.inference(
        compiled.fixed, {"input:0": compiled.upload(torch.ones(4, 8))}, 3
    )
    assert torch.equal(result.outputs[0].cpu(), torch.ones(4, 8))


class Outside(nn.Module):
    """A module that reads a tensor which is no buffer."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.tables = [table]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.tables[0]


def test_a_tensor_from_outside_is_read_anew_when_it_was_written_to(mesh: Any) -> None:
    table = torch.arange(8.0).to(xla_compat.device())
    x = torch.randn(4, 8, requires_grad=True)
    compiled = Compiled(Outside(table), [x], mesh)
    # The module was copied to the device, and its list with it.
    table = compiled.module.tables[0]  # type: ignore[index,union-attr]
    for step in range(3):
        table.add_(float(step))
        result = compiled.forward([compiled.upload(x)])
        assert close(result.outputs[0], x * table.cpu())
        result.live["tangent:0"] = compiled.upload(torch.ones(4, 8))
        grads, _ = compiled.programs.backward(compiled.fixed, result.live)
        assert close(grads[0], table.cpu().expand(4, 8))


def test_a_trained_tensor_from_outside_is_refused(mesh: Any) -> None:
    table = torch.ones(8, device=xla_compat.device(), requires_grad=True)
    with pytest.raises(
        PipelineError, match=r"need no gradient, got one of shape \[8\]"
    ):
        export_joint(Outside(table), [torch.ones(4, 8, device=table.device)], {})


def test_a_frozen_module_has_no_backward(mesh: Any) -> None:
    module = nn.Linear(8, 8).requires_grad_(False)
    compiled = Compiled(module, [torch.zeros(4, 8)], mesh)
    assert not compiled.programs.has_backward
    x = torch.randn(4, 8)
    result = compiled.forward([compiled.upload(x)], 0)
    assert result.live == {}
    assert close(result.outputs[0], copy.deepcopy(module)(x))


class Returning(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"x": x, "again": x, "note": "text", "none": None}


def test_outputs_may_have_numbers_texts_and_none_among_them() -> None:
    joint = export_joint(Returning(), [torch.ones(2)], {})
    assert len(joint.outputs) == 1
    assert joint.output_template.fill([7]) == {
        "x": 7,
        "again": 7,
        "note": "text",
        "none": None,
    }


class ReturningASet(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, {1, 2}


def test_other_outputs_are_refused() -> None:
    with pytest.raises(TypeError, match="expected tensors, .*got set. Register"):
        export_joint(ReturningASet(), [torch.ones(2)], {})


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(2)
        return x * self.weight


def test_a_forward_must_not_update_parameters(mesh: Any) -> None:
    with pytest.raises(PipelineError, match="only updates buffers in place.*weight"):
        Compiled(Writing(), [torch.zeros(4, 4)], mesh)


class Masking(nn.Module):
    """A mask as transformers makes it, whose values are read only outside of traces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.limit = torch.tensor(6)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and kept.all():
            return self.linear(x)
        places = torch.arange(8, device=x.device)
        with TransformGetItemToIndex():
            is_seen = torch.vmap(lambda i: kept[i] & (i < self.limit))
            mask = is_seen(places)
        rows = torch.vmap(lambda row, n: row * n + row.sum())
        return rows(self.linear(x), torch.arange(4.0, device=x.device)) * mask


def test_vmap_is_traced_and_modules_know_that_they_are_compiled(mesh: Any) -> None:
    torch.manual_seed(0)
    module, x, kept = Masking(), torch.randn(4, 8), torch.arange(8) > 1
    compiled = Compiled(module, [x.requires_grad_(), kept], mesh)
    result = compiled.forward([compiled.upload(x), compiled.upload(kept)])
    expected = module(x, kept)
    assert close(result.outputs[0], expected)
    expected.sum().backward()
    result.live["tangent:0"] = compiled.upload(torch.ones(4, 8))
    sums = compiled.zero_sums()
    grads, sums = compiled.programs.backward({**compiled.fixed, **sums}, result.live)
    assert close(grads[0], x.grad)
    assert close(sums["sum:param:linear.weight"], module.linear.weight.grad)


def test_a_trace_leaves_the_parameters_of_a_part_that_has_two_names(mesh: Any) -> None:
    part = nn.Linear(4, 4)
    module = nn.Sequential(nn.Sequential(part), nn.Sequential(part))
    module = module.to(xla_compat.device())
    before = dict(part.named_parameters())
    export_joint(module, [torch.empty(2, 4, device=xla_compat.device())], {})
    assert all(value is before[name] for name, value in part.named_parameters())
