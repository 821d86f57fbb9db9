"""What XLA cannot run is refused by name; what runs is what was traced."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile.stages import Compiled, close
from torch import Tensor, nn

from torch_xla_pp.errors import PipelineError

pytestmark = pytest.mark.xla


class Calling(nn.Module):
    """Apply a function to what a linear layer gives."""

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


LINE = r"test_running.py:\d+, in test_.*<lambda>"


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
    assert "test_running.py" in caught.value.__notes__[0]
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
