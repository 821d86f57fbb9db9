"""Any program with marks, yields and writes in place: the same values, or a refusal."""

import copy
from typing import Any

import pytest
import torch
from graph.splitting import SIZE, example, run_stages
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.pipelining import pipe_split

import torch_xla_pp as xpp

pytestmark = pytest.mark.pure

NUM_BUFFERS = 2
KINDS = (
    "mix",
    "mix",
    "mix",
    "yield",
    "yield",
    "mark",
    "write",
    "view",
    "count",
    "read",
)
Program = list[tuple[str, int, int]]


class Machine(nn.Module):
    """An interpreter of programs on a growing list of values."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.weights = nn.Parameter(torch.linspace(0.5, 2, SIZE), requires_grad=False)
        for i in range(NUM_BUFFERS):
            self.register_buffer(f"count{i}", torch.full((SIZE,), float(i)))

    def forward(self, x: Tensor) -> Any:
        values = [x * 1]
        for kind, a, b in self.program:
            first, second = values[a % len(values)], values[b % len(values)]
            buffer = getattr(self, f"count{b % NUM_BUFFERS}")
            if kind == "mix":
                values.append(first * self.weights + second)
            elif kind == "view":
                values.append(first[:1])
            elif kind == "write":
                first.mul_(1.5)
            elif kind == "count":
                buffer.add_(first.mean(0))
            elif kind == "read":
                values.append(first + buffer)
            elif kind == "yield":
                values[a % len(values)] = ended(first)
            else:
                pipe_split()
        return values[-1] * 2, values[len(values) // 2]


def ended(value: Tensor) -> Tensor:
    """Yield; what is yielded is no alias of what it was made from in a split model."""
    if torch.compiler.is_exporting():
        return xpp.pipeline_yield(value)
    return value.clone()


def programs() -> st.SearchStrategy[Program]:
    places = st.integers(0, 20)
    return st.lists(
        st.tuples(st.sampled_from(KINDS), places, places), min_size=4, max_size=16
    )


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(programs())
def test_a_split_program_computes_the_same_or_is_refused(program: Program) -> None:
    model = Machine(program)
    whole = copy.deepcopy(model)
    try:
        pipe = xpp.pipeline(model, mb_args=(example(),))
    except xpp.PlanError:
        assume(False)
        return
    torch.testing.assert_close(run_stages(pipe, example()), whole(example()))
    wanted = dict(whole.named_buffers())
    for stage in range(pipe.num_stages):
        for name, value in pipe.get_stage_module(stage).named_buffers():
            torch.testing.assert_close(value, wanted[name])
