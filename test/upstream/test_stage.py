"""What upstream's test_stage asserts of single stages."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds
from upstream.jobs import (
    ROWS,
    WIDTH,
    Branching,
    Shifted,
    Stack,
    build,
    feed,
    outcomes,
    summed_loss,
    trace,
)

pytestmark = pytest.mark.worlds

RANKS, COUNT = 2, 4


def outputs_of(stage: Any, *batches: Tensor, **kwargs: Tensor) -> Tensor | None:
    """Run a step without a loss for each batch; return the last output."""
    schedule = ScheduleGPipe(stage, COUNT)
    for x in batches:
        output = schedule.step(x, **kwargs) if stage.is_first else schedule.step()
    return output


def keeps_outputs_and_names(make: Callable[[], nn.Module], *names: str) -> None:
    model = make()
    known = set(model.state_dict())
    x, y = torch.randn(2, ROWS, WIDTH)
    kwargs = dict.fromkeys(names, y)
    with torch.no_grad():
        expected = model(x, **kwargs)
    stage = trace(model, COUNT, **kwargs)
    output = outputs_of(stage, x, **kwargs)
    if stage.is_last:
        torch.testing.assert_close(output.cpu(), expected, atol=1e-3, rtol=5e-2)
    assert set(stage.submod.state_dict()) <= known


def runs_by_hand() -> None:
    model, x = Stack(RANKS), torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        expected = model(x)
    (stage,) = build(model, [dist.get_rank()])
    output = outputs_of(stage, x)
    if stage.is_last:
        torch.testing.assert_close(output.cpu(), expected)


def keeps_only_the_last_outputs() -> None:
    (stage,) = build(Stack(RANKS), [dist.get_rank()])
    assert len(stage.output_chunks) == 0
    schedule = ScheduleGPipe(stage, COUNT, loss_fn=summed_loss)
    x, target = torch.randn(2, ROWS, WIDTH)
    feed(schedule.step, [stage], x, target, [])
    assert len(stage.fwd_cache) == 0
    assert len(stage.output_chunks) == (COUNT if stage.is_last else 0)


def two_layers() -> nn.Module:
    return Stack(RANKS)


CASES = {
    "tracer-ExampleCode": (keeps_outputs_and_names, (Branching,)),
    "tracer-MultiMLP": (keeps_outputs_and_names, (two_layers,)),
    "tracer_kwargs": (keeps_outputs_and_names, (Shifted, "y")),
    "manual": (runs_by_hand, ()),
    "output_chunks_memory_usage": (keeps_only_the_last_outputs, ()),
}


@pytest.fixture(scope="module")
def found(worlds: Worlds) -> dict[str, list[str]]:
    return outcomes(worlds, CASES)


@pytest.mark.parametrize("case", CASES)
def test_it_holds_on_two_ranks(found: dict[str, list[str]], case: str) -> None:
    assert found[case] == []


def raised(worlds: Worlds, function: Callable[..., None], *args: Any) -> list[str]:
    """Run what must fail; return the error of each rank."""
    found = worlds.run_outcomes(function, ranks=RANKS, args=args, keep_workers=True)
    assert all(outcome.error for outcome in found), found
    return [f"{outcome.error}: {outcome.message}" for outcome in found]


class Changing(nn.Module):
    """A change of a layer's output, as by a hook."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x)
        if self.change == "flatten":
            return output.flatten()
        return output.to(torch.bfloat16) if self.change == "bfloat16" else output


def wrong(what: str, is_declared: bool) -> None:
    """Step with a good batch, then with what must be refused."""
    dist.init_process_group("xla_pp")
    rank = dist.get_rank()
    good = torch.randn(ROWS, WIDTH)
    bad = {
        "uneven": torch.randn(ROWS + 1, WIDTH),
        "rows": torch.randn(ROWS + COUNT, WIDTH),
        "int32": good.to(torch.int32),
    }
    example = good.chunk(COUNT)[0]
    examples = {"input_args": example, "output_args": example} if is_declared else {}
    module = Changing(what if rank == 0 else "")
    stage = xpp.PipelineStage(module, rank, RANKS, xpp.device(), **examples)
    outputs_of(stage, *([good, bad[what]] if what in bad else [good]))


WRONG = ("rows", "int32", "flatten", "bfloat16")
FLAT = (
    r"stage 1: its module cannot run on inputs \(float32\[64\]\): RuntimeError in "
    r"torch.\S*linear \(.*test_stage.py:\d+, in Changing.forward\)"
)


@pytest.mark.parametrize(
    ("what", "is_declared", "expected"),
    [
        ("uneven", False, r"expected .* divide into 4 equal microbatches, got 17 rows"),
        ("flatten", False, FLAT),
        ("rows", True, r"expected inputs float32\[4, 16\], got float32\[5, 16\]"),
        ("int32", True, r"expected inputs float32\[4, 16\], got int32\[4, 16\]"),
        ("flatten", True, r"expected outputs float32\[4, 16\], got float32\[64\]"),
        ("bfloat16", True, r"expected outputs float32\[4, 16\], got bfloat16\[4, 16\]"),
    ],
    ids=["uneven", "flatten", *(f"stated-{what}" for what in WRONG)],
)
def test_shapes_and_dtypes_that_do_not_fit(
    worlds: Worlds, what: str, is_declared: bool, expected: str
) -> None:
    for text in raised(worlds, wrong, what, is_declared):
        assert re.match(f"StageShapeError: .*{expected}", text), text


def weights_first() -> None:
    dist.init_process_group("xla_pp")
    (stage,) = build(Stack(RANKS), [dist.get_rank()])
    stage.has_backward = True
    stage.backward_weight_one_chunk(bwd_chunk_id=0)


def test_gradients_of_weights_need_a_backward_before(worlds: Worlds) -> None:
    for text in raised(worlds, weights_first):
        assert re.match(r"PipelineError: stage \d: expected a (schedule|forward)", text)


def clears_between_steps() -> list[int]:
    dist.init_process_group("xla_pp")
    (stage,) = build(Stack(RANKS), [dist.get_rank()])
    outputs_of(stage, torch.randn(ROWS, WIDTH))
    before = len(stage.output_chunks)
    stage.clear_runtime_states()
    return [before, len(stage.output_chunks)]


def test_a_stage_may_be_cleared_after_a_step(worlds: Worlds) -> None:
    assert worlds.run(clears_between_steps, ranks=RANKS) == [[0, 0], [COUNT, 0]]


def hooked(what: str) -> None:
    dist.init_process_group("xla_pp")
    rank, x = dist.get_rank(), torch.randn(ROWS, WIDTH)
    example, module = x.chunk(COUNT)[0], nn.Linear(WIDTH, WIDTH)
    stage = xpp.PipelineStage(
        module, rank, RANKS, xpp.device(), input_args=example, output_args=example
    )
    schedule = ScheduleGPipe(stage, COUNT)
    for step in range(2):
        if step == 1 and rank == 0:
            module.register_forward_hook(CHANGES[what])
        schedule.step(x) if stage.is_first else schedule.step()


CHANGES = {
    "flatten": lambda module, inputs, output: output.flatten(),
    "bfloat16": lambda module, inputs, output: output.to(torch.bfloat16),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_hook_that_changes_shape_or_dtype(worlds: Worlds, what: str) -> None:
    for text in raised(worlds, hooked, what):
        assert re.match(r"StageShapeError: stage 0: expected outputs", text), text
