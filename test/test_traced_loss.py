"""What a trace reports besides the model's own work: losses, unknown operations."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planned_models import GPT, ROWS, VOCAB, Branches, batch_of
from torch import Tensor, nn
from torch.nn import functional as F

from torch_xla_pp.cli import main
from torch_xla_pp.planner import make_plan
from torch_xla_pp.tracing import trace_work
from torch_xla_pp.work import Cost, WorkGraph

pytestmark = pytest.mark.xla

LENGTH = 8


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def test_a_loss_adds_what_its_program_moves_to_the_last_backward() -> None:
    args, target = batch_of("gpt"), torch.zeros(ROWS, LENGTH, dtype=torch.long)
    model = GPT(2)
    without = trace_work(model, args)
    work = trace_work(model, args, loss_fn=token_loss, target=target)
    assert work.has_loss and not without.has_loss
    assert work.works[:-1] == without.works[:-1]
    last, before = work.works[-1], without.works[-1]
    assert replace(last, backward_input=before.backward_input) == before
    more = last.backward_input.of(ROWS)[1] - before.backward_input.of(ROWS)[1]
    logits, labels = ROWS * LENGTH * VOCAB * 4, ROWS * LENGTH * 8
    # It reads logits and labels, and writes a gradient; and a few scalars.
    assert 4 <= more - (2 * logits + labels) <= 16
    assert work.digest == without.digest
    assert WorkGraph.from_json(work.to_json()) == work


def test_a_loss_of_several_outputs_and_a_product_counts_its_flops() -> None:
    weight = torch.zeros(4, 6)

    def loss_fn(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        first, second = outputs
        return F.mse_loss(first @ weight, target) + second.sum()

    args = batch_of("branches")
    without = trace_work(Branches(), args)
    work = trace_work(Branches(), args, loss_fn=loss_fn, target=torch.zeros(ROWS, 6))
    flops = work.works[-1].backward_input.flops_per_row
    # A product for the loss, and one for its gradient.
    assert flops - without.works[-1].backward_input.flops_per_row == 2 * 2 * 4 * 6


def test_a_second_loss_is_refused() -> None:
    work = trace_work(Branches(), batch_of("branches")).with_loss(Cost(bytes=1))
    with pytest.raises(ValueError, match="expected .* no loss so far, got .* and a"):
        work.with_loss(Cost())


@pytest.fixture
def strange() -> Iterator[nn.Module]:
    """A model with an operation of its own."""

    @torch.library.custom_op("planned_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    twice.register_fake(lambda x: torch.empty_like(x))
    twice.register_autograd(lambda context, grad: 2 * grad)

    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = twice(layer(x))
            return x

    yield Strange()


def test_operations_of_unknown_cost_are_listed_and_warned_of(
    strange: nn.Module,
) -> None:
    work = trace_work(strange, (torch.zeros(4, 16),))
    assert list(work.unknown_ops) == ["planned_test.twice.default"]
    assert work.unknown_ops["planned_test.twice.default"] == 0.5
    plan = make_plan(work, rows=16, ranks=2, replicas=(1,))
    assert "unknown FLOPs write 50 % of all bytes" in str(plan)
    assert "planned_test.twice.default" in str(plan)
    assert "no loss was given" in str(plan)
    little = replace(work, unknown_ops={"planned_test.twice.default": 0.05})
    quiet = make_plan(little.with_loss(Cost()), rows=16, ranks=2, replicas=(1,))
    assert not quiet.costs.warnings


def test_layers_of_a_traced_model_are_repeated() -> None:
    args = batch_of("gpt")
    few = trace_work(GPT(4), args, max_stages=4).repeated("blocks", 8)
    many = trace_work(GPT(8), args, max_stages=4)
    assert [work.digest for work in few.works] == [work.digest for work in many.works]
    assert [work.module for work in few.works] == [work.module for work in many.works]
    assert few.edges == many.edges
    # No model has its operations.
    assert not few.op_digests and many.op_digests
    plans = [make_plan(work, rows=32, ranks=4, replicas=(1,)) for work in (few, many)]
    assert plans[0].predicted == plans[1].predicted


SCRIPT = """
import torch
from torch import nn
from torch.nn.functional import mse_loss

class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x)) if x.sum() > 0 else self.first(x)

def choosing():
    return Choosing(), (torch.zeros(2, 8),)

def trained():
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return layers, (torch.zeros(2, 8),), mse_loss, torch.zeros(2, 8)

def halfway():
    return Choosing(), (torch.zeros(2, 8),), mse_loss
"""


def test_a_script_may_name_a_loss_and_its_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "models.py"
    script.write_text(SCRIPT)
    options = ["--rows", "8", "--ranks", "2", "--replicas", "1"]
    assert main(["plan", f"{script}:trained", *options]) == 0
    assert "no loss was given" not in capsys.readouterr().out
    assert main(["plan", f"{script}:halfway", *options]) == 1
    assert "a loss function with its target or neither" in capsys.readouterr().err


def test_a_model_that_cannot_be_traced_gives_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "models.py"
    script.write_text(SCRIPT)
    assert main(["plan", f"{script}:choosing", "--rows", "8", "--ranks", "2"]) == 1
    message = capsys.readouterr().err
    assert "error: trace: expected a model that torch.export traces" in message
    # The line that is at fault.
    assert "if x.sum() > 0 else" in message
