"""Operations know the lines of the model that they come from."""

from typing import Any

import pytest
import torch
from torch import fx, nn

from torch_xla_pp.compile.lines import place_of, running_line

pytestmark = pytest.mark.pure

TRACE = 'File "/home/model.py", line 7, in forward\n    return x.chunk(3)'
seen: list[str | None] = []


def look(x: torch.Tensor) -> torch.Tensor:
    seen.append(running_line(outer.__code__))
    return x


def outer(module: nn.Module) -> Any:
    return fx.Interpreter(module).run(torch.zeros(1))


def test_an_operation_of_a_graph_has_the_line_that_its_trace_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As code of this package, which is no model's.
    monkeypatch.setattr("torch_xla_pp.compile.lines._PACKAGE", __file__)
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(look, (x,))
    graph.output(graph.call_function(look, (node,)))
    node.meta["stack_trace"] = TRACE
    seen.clear()
    outer(fx.GraphModule(nn.Module(), graph))
    assert place_of(seen[0]) == "/home/model.py:7, in forward"
    assert seen[1] is None or "model.py" not in seen[1]
