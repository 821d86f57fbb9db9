"""Rules run operations; what XLA cannot run is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile.stages import Compiled, close
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from torch_xla_pp.compile.lowering import Lowering
from torch_xla_pp.errors import PipelineError

pytestmark = pytest.mark.xla


class Calling(nn.Module):
    """A function of the output of a linear layer."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


def run(function: Callable[[Tensor], Any], mesh: Any) -> None:
    module = Calling(function)
    x = torch.rand(4, 4, requires_grad=True)
    compiled = Compiled(module, [x], mesh)
    result = compiled.forward([compiled.upload(x)])
    for index, needs_grad in enumerate(compiled.joint.outputs_need_grad):
        if needs_grad:
            result.live[f"tangent:{index}"] = result.outputs[index]
    fixed = {**compiled.fixed, **compiled.zero_sums()}
    compiled.programs.backward(fixed, result.live)


LINE = r"test_lowering.py:\d+, in test_.*<lambda>"


def test_an_operation_that_runs_on_the_host_is_refused(mesh: Any) -> None:
    error = rf"forward program: .*got aten.lgamma.default \(.*{LINE}\), which .* host"
    with pytest.raises(PipelineError, match=error):
        run(lambda x: torch.lgamma(x), mesh)


def test_so_is_one_of_the_backward_by_the_line_of_its_forward(mesh: Any) -> None:
    error = rf"backward program: .*got aten._pdist_backward.default \(.*{LINE}\)"
    with pytest.raises(PipelineError, match=error):
        run(lambda x: nn.functional.pdist(x).view(2, 3), mesh)


def test_so_is_one_whose_result_is_a_number(mesh: Any) -> None:
    """It would be taken for a constant of the program."""
    with pytest.raises(PipelineError, match=r"aten.median.default .* on the host"):
        run(lambda x: x * torch.median(x), mesh)


def test_a_result_that_torch_xla_does_not_give_is_missed(mesh: Any) -> None:
    error = r"aten._linalg_slogdet.default .* shape \[4, 4\] on XLA devices, got None"
    with pytest.raises(PipelineError, match=error):
        run(lambda x: x * torch.logdet(x @ x.t()), mesh)


def test_an_operation_that_fails_is_named(mesh: Any) -> None:
    error = rf"aten.cumsum.default \(.*{LINE}\) failed: Value out of range"
    with pytest.raises(PipelineError, match=error):
        run(lambda x: x * x.sum().cumsum(0), mesh)


def test_an_operation_that_cannot_be_compiled_is_named(mesh: Any) -> None:
    error = rf"XLA cannot compile aten._linalg_svd.default \(.*{LINE}\): .*svd"
    with pytest.raises(PipelineError, match=error):
        run(lambda x: x[:0].svd().U.sum() + x, mesh)


def test_an_operation_that_cannot_be_traced_is_named(mesh: Any) -> None:
    with pytest.raises(Exception, match="aten.masked_select") as caught:
        run(lambda x: x.masked_select(x > 0), mesh)
    assert "test_lowering.py" in caught.value.__notes__[0]
    assert "in torch.Tensor.masked_select" in caught.value.__notes__[0]


def test_a_function_may_compute_nothing(mesh: Any) -> None:
    module = nn.Flatten(0, -1)
    x = torch.rand(4, requires_grad=True)
    compiled = Compiled(module, [x], mesh)
    for _ in range(2):
        value = torch.rand(4)
        result = compiled.forward([compiled.upload(value)])
        assert close(result.outputs[0], value)
        result.live["tangent:0"] = compiled.upload(value)
        grads, _ = compiled.programs.backward(compiled.fixed, result.live)
        assert close(grads[0], value)


def test_what_an_operation_makes_on_the_host_is_made_on_the_device(mesh: Any) -> None:
    def made_on_host(x: Tensor) -> tuple[Tensor, ...]:
        drawn = torch.rand(64)
        return x * torch.full((), 2.0), torch.ones(2), drawn, x.cpu() + torch.eye(4)

    module = Calling(made_on_host)
    x = torch.rand(4, 4, requires_grad=True)
    compiled = Compiled(module, [x], mesh)
    outputs = compiled.forward([compiled.upload(x)]).outputs
    twice, ones, first, moved = (outputs[index] for index in range(4))
    second = compiled.forward([compiled.upload(x)], seed=1).outputs[2]
    product = module.linear(x)
    assert close(twice, product * 2)
    assert close(ones, torch.ones(2))
    assert close(moved, product + torch.eye(4))
    assert len({*first.cpu().tolist(), *second.cpu().tolist()}) > 64


def run_by(*rules: Any) -> Tensor:
    module = make_fx(lambda x: (x.sin().cos(), x.sin()))(torch.ones(2))
    result: Tensor = Lowering(module, "test", rules).run(torch.ones(2))[0]
    return result


def is_sin(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.sin.default


def test_an_operation_is_run_by_the_first_rule_that_knows_it() -> None:
    def unknowing(node: fx.Node, values: Any, notes: Any) -> None:
        return None

    def negating(node: fx.Node, values: Any, notes: Any) -> Tensor | None:
        return -values[node.args[0]] if is_sin(node) else None

    def failing(node: fx.Node, values: Any, notes: Any) -> None:
        if is_sin(node):
            raise RuntimeError("asked in vain")

    assert torch.equal(run_by(unknowing), torch.ones(2).sin().cos())
    found = run_by(unknowing, negating, failing)
    assert torch.equal(found, (-torch.ones(2)).cos())
    with pytest.raises(PipelineError, match=r"test program: aten.sin.* failed: asked"):
        run_by(failing, negating)


def test_what_a_rule_notes_is_there_for_the_rest_of_the_run_alone() -> None:
    def noting(node: fx.Node, values: Any, notes: dict[fx.Node, Any]) -> Tensor | None:
        if is_sin(node):
            notes[node] = len(notes)
            return None
        return values[node.args[0]] + notes[node.args[0]]  # type: ignore[index, no-any-return]

    for _ in range(2):
        assert torch.equal(run_by(noting), torch.ones(2).sin())
