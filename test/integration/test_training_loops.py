"""What training loops do, they do as in eager.

One pipeline of two ranks is trained in all of these ways, each from the same weights,
beside the unsplit model. Tolerance 1e-5 of the largest element, float32, for the
parameters after some steps: both sides sum in their own order.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch_xla.debug.metrics as debug
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

WIDTH, CLASSES, ROWS, MICROBATCHES, STEPS = 6, 5, 8, 4, 4


class Adapted(nn.Module):
    """A linear layer with low-rank adapters, as LoRA has them."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, rows)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, rows, bias=False)
        self.scale = nn.Parameter(torch.ones(rows))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x).tanh() * self.scale + self.up(self.down(x))


def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    right = (output.argmax(-1) == target).sum()
    counts = F.one_hot(target, CLASSES).sum(0)
    return F.cross_entropy(output.float(), target), {"right": right, "counts": counts}


@dataclass
class Loop:
    """A model and what trains it, on one side."""

    modules: list[nn.Module]
    backward: Callable[[Tensor, Tensor], None]

    def parameters(self) -> list[nn.Parameter]:
        found = [p for module in self.modules for p in module.parameters()]
        return [p for p in found if p.requires_grad]

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]


def batches(count: int) -> Iterable[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(ROWS, WIDTH, generator=generator)
        yield x, torch.randint(CLASSES, (ROWS,), generator=generator)


def train(loop: Loop, optimizer: Any, after: Callable[[], None] = lambda: None) -> None:
    for x, y in batches(STEPS):
        loop.backward(x, y)
        optimizer.step()
        optimizer.zero_grad()
        after()


def accumulate(loop: Loop) -> None:
    optimizer = torch.optim.AdamW(loop.parameters(), lr=0.05)
    for number, (x, y) in enumerate(batches(6)):
        loop.backward(x, y)
        if number % 3 == 2:
            for grad in loop.gradients():
                grad.div_(3)
            optimizer.step()
            optimizer.zero_grad()


def keep_zeros(loop: Loop) -> None:
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for x, y in batches(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loop.backward(x, y)
        optimizer.step()


def schedule_rates(loop: Loop) -> None:
    optimizer = torch.optim.AdamW(loop.parameters(), lr=0.05)
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    rates = lr_scheduler.SequentialLR(optimizer, [warm, cosine], [2])
    train(loop, optimizer, rates.step)


def clip_elements(loop: Loop) -> None:
    optimizer = torch.optim.RMSprop(loop.parameters(), lr=0.01)
    for x, y in batches(STEPS):
        loop.backward(x, y)
        nn.utils.clip_grad_value_(loop.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


def clip_parts(loop: Loop) -> None:
    """Parameters are read right after the last update, which reads all gradients."""
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.5)
    for x, y in batches(STEPS):
        loop.backward(x, y)
        for module in loop.modules:
            nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()


def average(loop: Loop) -> None:
    averaging: Any = get_ema_multi_avg_fn(0.5)
    averaged = [AveragedModel(m, multi_avg_fn=averaging) for m in loop.modules]
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.5)

    def update() -> None:
        for ema, module in zip(averaged, loop.modules, strict=True):
            ema.update_parameters(module)

    train(loop, optimizer, update)
    with torch.no_grad():
        for ema, module in zip(averaged, loop.modules, strict=True):
            for own, mean in zip(
                module.parameters(), ema.module.parameters(), strict=True
            ):
                own.copy_(mean)


def go_on(loop: Loop) -> None:
    first = torch.optim.AdamW(loop.parameters(), lr=0.05)
    train(loop, first)
    second = torch.optim.AdamW(loop.parameters(), lr=0.01)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(loop, second)


def decay_some(loop: Loop) -> None:
    groups = [
        {"params": [p for p in loop.parameters() if p.dim() > 1], "weight_decay": 0.5},
        {"params": [p for p in loop.parameters() if p.dim() < 2], "lr": 0.2},
    ]
    train(loop, torch.optim.AdamW(groups, lr=0.05, weight_decay=0.0))


def adapt(loop: Loop) -> None:
    frozen = [p for m in loop.modules for p in m.base.parameters()]  # type: ignore[union-attr]
    for parameter in frozen:
        parameter.requires_grad_(False)
    train(loop, torch.optim.AdamW(loop.parameters(), lr=0.05))
    for parameter in frozen:
        assert parameter.grad is None
        parameter.requires_grad_(True)


HABITS: dict[str, Callable[[Loop], None]] = {
    "gradient accumulation": accumulate,
    "zero_grad(set_to_none=False), SGD with momentum": keep_zeros,
    "learning rate schedulers": schedule_rates,
    "clip_grad_value_": clip_elements,
    "clip_grad_norm_ of each stage": clip_parts,
    "exponential moving averages": average,
    "an optimizer's state loaded": go_on,
    "groups of parameters": decay_some,
    "LoRA": adapt,
    "foreach": lambda loop: train(
        loop, torch.optim.AdamW(loop.parameters(), lr=0.05, foreach=True)
    ),
    "Adagrad": lambda loop: train(loop, torch.optim.Adagrad(loop.parameters(), 0.1)),
}


def restore(modules: Iterable[nn.Module], state: dict[str, Tensor]) -> None:
    for number, module in enumerate(modules):
        own = {
            k.removeprefix(f"{number}."): v
            for k, v in state.items()
            if k.startswith(f"{number}.")
        }
        module.load_state_dict(own)
        module.zero_grad()


def try_all() -> dict[str, float]:
    """Return the largest relative error of each habit."""
    rank = join().rank()
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(WIDTH), Adapted(CLASSES))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    stage = xpp.PipelineStage(copy.deepcopy(model[rank]), rank, 2, xpp.device())
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    own_state = {
        name.replace(f"{rank}.", "0.", 1): value
        for name, value in state.items()
        if name.startswith(f"{rank}.")
    }
    cast: list[Callable[[], AbstractContextManager[Any]]] = [nullcontext]
    errors: dict[str, float] = {}

    def step(x: Tensor, y: Tensor) -> None:
        with cast[0]():
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y.to(xpp.device()))

    def unsplit(x: Tensor, y: Tensor) -> None:
        with cast[-1]():
            output = model(x)
        loss, _ = loss_fn(output, y)
        loss.backward()

    def compare(name: str, habit: Callable[[Loop], None]) -> None:
        restore(model, state)
        restore([stage.submod], own_state)
        habit(Loop([*model], unsplit))
        habit(Loop([stage.submod], step))
        pairs = zip(stage.submod.parameters(), model[rank].parameters(), strict=True)
        errors[name] = max(
            float((got.detach().cpu() - want.data).abs().max() / want.data.abs().max())
            for got, want in pairs
        )

    for name, habit in HABITS.items():
        compare(name, habit)
    cast[:] = [
        lambda: torch.autocast("xla", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ]
    # torch's own list of devices for it has none of XLA's.
    fused = torch.optim.AdamW(stage.submod.parameters(), fused=True)
    with pytest.raises(RuntimeError, match="`fused=True` requires all the params"):
        train(Loop([stage.submod], step), fused)
    compare("bfloat16 by autocast", lambda loop: train(loop, sgd(loop)))
    cast[:] = [nullcontext]
    return errors


def sgd(loop: Loop) -> torch.optim.Optimizer:
    return torch.optim.SGD(loop.parameters(), lr=0.1)


def test_habits_of_training_loops_do_as_in_eager(worlds: Worlds) -> None:
    for errors in worlds.run(try_all, ranks=2):
        assert errors.keys() == {*HABITS, "bfloat16 by autocast"}
        # bfloat16 keeps 8 bits; its errors are those of the gradients, times the rate.
        assert errors.pop("bfloat16 by autocast") < 4e-3
        assert {name: e for name, e in errors.items() if not e < 1e-5} == {}


def ask_for_losses() -> dict[str, Any]:
    rank = join().rank()
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(WIDTH), Adapted(CLASSES))
    stage = xpp.PipelineStage(copy.deepcopy(model[rank]), rank, 2, xpp.device())
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    found: dict[str, Any] = {"errors": []}
    for number, (x, y) in enumerate(batches(3)):
        before = debug.counter_value("UncachedCompile") or 0
        call = schedule.eval if number == 1 else schedule.step
        if rank == 0:
            call(x)
        else:
            call(target=y.to(xpp.device()))
        losses, metrics = xpp.losses(schedule), xpp.metrics(schedule)
        found["compiled"] = (debug.counter_value("UncachedCompile") or 0) - before
        parts = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
        with torch.no_grad():
            wanted = torch.stack([loss_fn(model(a), b)[0] for a, b in parts])
            _, whole = loss_fn(model(x), y)
        found["errors"].append(float((losses - wanted).abs().max()))
        found["equal"] = all(torch.equal(metrics[k], whole[k]) for k in whole)
        assert losses.shape == (MICROBATCHES,)
    return found


def test_losses_and_metrics_are_there_on_every_rank(worlds: Worlds) -> None:
    for found in worlds.run(ask_for_losses, ranks=2):
        assert max(found["errors"]) < 1e-6
        assert found["equal"]
        assert found["compiled"] == 0


def ask_too_early() -> None:
    rank = join().rank()
    stage = xpp.PipelineStage(nn.Linear(2, 2), rank, 2, xpp.device())
    xpp.losses(Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss))


def test_losses_of_no_step_are_refused_on_every_rank(worlds: Worlds) -> None:
    for outcome in worlds.run_outcomes(ask_too_early, ranks=2, keep_workers=True):
        assert outcome.error == "PipelineError"
        assert "losses: expected a step with losses, got none" in outcome.message
