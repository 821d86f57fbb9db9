"""A forward, its loss and its backward as one program: the same numbers, one dispatch.

The stage is the last one under 1F1B, which has them right after each other. It is
trained in one rank, and beside it a copy whose programs stay apart.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp import cpu, xla_compat
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

WIDTH, MICROBATCHES, ROWS = 24, 4, 16
STEPS = 3


class Net(nn.Module):
    """A residual block with buffers, whose forward updates them, and dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.gelu(self.up(self.norm(x))), self.dropout, self.training)
        return x + self.down(y)


class Scaled:
    """A loss with metrics, that reads a number and a tensor from outside."""

    def __init__(self) -> None:
        self.factor, self.shift = 1.0, torch.zeros(())

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Any]:
        error = F.mse_loss(output, target) * self.factor + self.shift.to(output.device)
        # A metric may be a constant that the loss makes on the host.
        largest = (output - target).abs().max()
        return error, {"largest": largest, "rows": torch.full((), len(output))}


def eager_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cannot be traced: what it computes depends on a value."""
    scale = 2.0 if bool((target.detach().cpu() > -99).all()) else 1.0
    return F.mse_loss(output, target) * scale


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target.to(output.device))


def make(module: nn.Module, loss: Callable[..., Any], *, is_joined: bool) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if not is_joined:
            patch.setattr(cpu, "most_joined_bytes", lambda: 0)
        stage = xpp.PipelineStage(copy.deepcopy(module), 0, 1, xpp.device())
    return stage, Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
    return x, y.to(xpp.device())


def programs_of(stage: Any) -> set[str]:
    return {p.name for p in stage.explain().programs} & {
        "forward",
        "backward",
        "forward and backward",
    }


def check_equal(stages: list[Any], losses: list[list[Tensor]]) -> None:
    joined, apart = (stage.submod for stage in stages)
    for got, want in zip(*losses, strict=True):
        torch.testing.assert_close(got.cpu(), want.cpu(), rtol=1e-5, atol=1e-6)
    state = apart.state_dict()
    for name, value in joined.state_dict().items():
        torch.testing.assert_close(value.cpu(), state[name].cpu(), rtol=1e-5, atol=1e-5)
    named = dict(apart.named_parameters())
    for name, parameter in joined.named_parameters():
        other = named[name]
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None:
            got, want = parameter.grad.cpu(), other.grad.cpu()
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def train_both(
    loss: Callable[[], Any], dropout: float, change: Callable[[Any, Any, int], None]
) -> list[set[str]]:
    """Train a stage in both ways; return what programs each has."""
    join()
    torch.manual_seed(0)
    module = Net(dropout)
    losses_of = [loss(), loss()]
    made = [
        make(module, fn, is_joined=i == 0)
        for i, fn in zip((0, 1), losses_of, strict=True)
    ]
    optimizers = [torch.optim.SGD(stage.submod.parameters(), 0.1) for stage, _ in made]
    for step in range(STEPS):
        x, y = batch(step)
        found: list[list[Tensor]] = []
        for (stage, schedule), fn in zip(made, losses_of, strict=True):
            change(stage, fn, step)
            losses: list[Tensor] = []
            schedule.step(x, target=y, losses=losses)
            assert stage.peak_memory().num_live == 1
            found.append(losses)
        check_equal([stage for stage, _ in made], found)
        metrics = [xpp.metrics(schedule) for _, schedule in made]
        if metrics[0]:
            torch.testing.assert_close(*(m["largest"].cpu() for m in metrics))
            assert [int(m["rows"].sum()) for m in metrics] == [ROWS, ROWS]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
    return [programs_of(stage) for stage, _ in made]


def nothing(stage: Any, loss: Any, step: int) -> None:
    pass


def freeze_and_count(stage: Any, loss: Any, step: int) -> None:
    """Change all that a user may change between steps."""
    stage.submod.down.requires_grad_(step != 1)
    stage.submod.train(step != 2)
    loss.factor = 1.0 + step
    loss.shift.fill_(step)


ONE, APART = {"forward and backward"}, {"forward", "backward"}


def plain_losses() -> list[set[str]]:
    return train_both(lambda: mean_loss, 0.0, nothing)


def random_stages() -> list[set[str]]:
    return train_both(Scaled, 0.5, nothing)


def changed_stages() -> list[set[str]]:
    return train_both(Scaled, 0.0, freeze_and_count)


def eager_losses() -> list[set[str]]:
    return train_both(lambda: eager_loss, 0.0, nothing)


@pytest.mark.parametrize("run", [plain_losses, random_stages, changed_stages])
def test_one_program_computes_what_three_do(
    worlds: Worlds, run: Callable[[], Any]
) -> None:
    ((joined, apart),) = worlds.run(run, ranks=1, devices=1)
    assert (joined, apart) == (ONE, APART)


def test_a_loss_that_is_no_program_leaves_them_apart() -> None:
    # Autograd must not have run on the CPU alone in a process that runs a loss eagerly.
    with Worlds() as own:
        ((joined, apart),) = own.run(eager_losses, ranks=1, devices=1)
    assert (joined, apart) == (APART, APART)


def dispatches_and_records() -> dict[str, Any]:
    """Return what steps enqueue in both ways, and what is recorded of one."""
    join()
    torch.manual_seed(0)
    module, found = Net(0.0), {}
    x, y = batch(0)
    for is_joined in (True, False):
        stage, schedule = make(module, mean_loss, is_joined=is_joined)
        for _ in range(3):
            before = xla_compat.num_enqueued()
            schedule.step(x, target=y)
            found[f"enqueued, {is_joined}"] = xla_compat.num_enqueued() - before
    stage, schedule = make(module, mean_loss, is_joined=True)
    schedule.step(x, target=y)
    with xpp.profile_step(schedule) as profile:
        schedule.step(x, target=y)
    spans = profile.timeline.spans
    found["actions"] = [f"{s.stage}{s.kind}{s.microbatch}" for s in spans]
    output = schedule.step(x, target=y)
    found["shape"] = list(output.shape)
    found["programs"] = programs_of(stage)
    return found


def test_three_dispatches_are_one_and_records_name_single_actions(
    worlds: Worlds,
) -> None:
    (found,) = worlds.run(dispatches_and_records, ranks=1, devices=1)
    assert found["enqueued, False"] - found["enqueued, True"] == 2 * MICROBATCHES
    actions = [f"0{kind}{i}" for i in range(MICROBATCHES) for kind in "FB"]
    assert found["actions"] == actions
    # What is recorded, or returns outputs, is apart.
    assert found["shape"] == [ROWS, WIDTH]
    assert found["programs"] == ONE | APART


def failing_loss() -> tuple[str, int]:
    """Let a loss fail once; return its error, and what is saved at last."""
    join()
    torch.manual_seed(0)
    wrong = Scaled()
    stage, schedule = make(Net(0.0), wrong, is_joined=True)
    x, y = batch(0)
    losses: list[Tensor] = []
    schedule.step(x, target=y, losses=losses)
    wrong.shift = torch.zeros(2)
    with pytest.raises(PipelineError) as error:
        schedule.step(x, target=y)
    wrong.shift = torch.zeros(())
    again: list[Tensor] = []
    schedule.step(x, target=y, losses=again)
    assert torch.equal(again[0].cpu(), losses[0].cpu())
    return str(error.value), len(stage.saved)


def test_a_loss_that_fails_leaves_nothing(worlds: Worlds) -> None:
    ((message, num_saved),) = worlds.run(failing_loss, ranks=1, devices=1)
    assert "loss_fn: expected a loss of shape []" in message
    assert num_saved == 0
