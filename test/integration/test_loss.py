"""The user's loss function, compiled or not, is differentiated as eager does."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_xla.debug.metrics as metrics
from joining import join
from logged import logged
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

WIDTH, ROWS, MICROBATCHES, STEPS = 4, 12, 3, 4


class Case:
    """A loss function, what changes before each step, and the same on the host."""

    def __init__(self, device: torch.device) -> None:
        self.weight = torch.tensor([1.0, 2.0, 3.0, 4.0]).to(device)
        self.factor = 1.0

    def begin(self, step: int) -> None:
        """Change what the loss reads from outside."""


class Weighted(Case):
    """A closure over a tensor that is written to in place."""

    def begin(self, step: int) -> None:
        self.weight.add_(float(step))

    def make(self) -> Callable[[Tensor, Tensor], Tensor]:
        weight = self.weight
        return lambda output, target: ((output - target) ** 2 * weight).mean()


class Rebound(Case):
    """A method that reads a number and a tensor which are replaced."""

    def begin(self, step: int) -> None:
        self.factor = 1.0 + step % 2
        if step == 2:
            self.weight = self.weight * 2

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (F.l1_loss(output, target, reduction="none") * self.weight).mean() * (
            self.factor
        )

    def make(self) -> Callable[[Tensor, Tensor], Tensor]:
        return self.loss


class Looked(Case):
    """A loss that cannot be traced, as its computation depends on a value."""

    def make(self) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            scale = 2.0 if bool((target.detach().cpu() > 0).any()) else 1.0
            return F.mse_loss(output, target) * scale

        return loss


class AsModule(Case):
    """A module with a buffer."""

    def make(self) -> Callable[[Tensor, Tensor], Tensor]:
        chosen = nn.CrossEntropyLoss(weight=self.weight, label_smoothing=0.1)
        return lambda output, target: chosen(output, target.argmax(dim=1))


def train(kind: type[Any]) -> tuple[dict[str, float], list[str], int]:
    """Compare losses and gradients; return warnings and late compilations."""
    rank = join().rank()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    part = copy.deepcopy(reference[rank])
    stage = xpp.PipelineStage(part, rank, 2, xpp.device())
    own, expected = kind(xpp.device()), kind(torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=own.make())
    errors = {"loss": 0.0, "grad": 0.0}
    with logged() as texts:
        for number in range(STEPS):
            own.begin(number)
            expected.begin(number)
            x, y = torch.randn(2, ROWS, WIDTH)
            losses: list[Tensor] = []
            before = metrics.counter_value("UncachedCompile") or 0
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y.to(xpp.device()), losses=losses)
            compiled = (metrics.counter_value("UncachedCompile") or 0) - before
            parts = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
            function = expected.make()
            wanted = [function(reference(part_x), part_y) for part_x, part_y in parts]
            (sum(wanted) / MICROBATCHES).backward()
            for got, want in zip(losses, wanted, strict=False):
                errors["loss"] = max(errors["loss"], abs(float(got) - float(want)))
    for got, want in zip(
        stage.submod.parameters(), reference[rank].parameters(), strict=True
    ):
        errors["grad"] = max(
            errors["grad"], float((got.grad.cpu() - want.grad).abs().max())
        )
    return errors, texts, compiled


@pytest.mark.parametrize("kind", [Weighted, Rebound, AsModule, Looked])
def test_losses_and_gradients_equal_eagers(worlds: Worlds, kind: type[Any]) -> None:
    for rank, (errors, texts, compiled) in enumerate(
        worlds.run(train, ranks=2, args=(kind,))
    ):
        assert errors["loss"] < 1e-5
        assert errors["grad"] < 1e-5
        assert compiled == 0
        if rank == 1 and kind is Looked:
            assert texts[0].startswith("loss_fn cannot be compiled and runs eagerly")
            assert len(texts) == 1
        else:
            assert texts == []


def refuse(make: Callable[[], Any]) -> None:
    rank = join().rank()
    stage = xpp.PipelineStage(nn.Linear(WIDTH, WIDTH), rank, 2, xpp.device())
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=make())
    x = torch.zeros(ROWS, WIDTH)
    if rank == 0:
        schedule.step(x)
        dist.barrier()
    else:
        schedule.step(target=x.to(xpp.device()), losses=[])


def learned() -> Any:
    factor = nn.Parameter(torch.ones(WIDTH).to(xpp.device()))
    return lambda output, target: ((output - target) * factor).sum()


def unreduced() -> Any:
    return nn.MSELoss(reduction="none")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            learned,
            "tensors from outside of the module to need no gradient, got one of shape",
        ),
        (unreduced, r"expected a loss of shape \[\], got \[4, 4\]"),
    ],
)
def test_a_loss_that_loses_gradients_is_refused_on_every_rank(
    worlds: Worlds, make: Callable[[], Any], text: str
) -> None:
    outcomes = worlds.run_outcomes(refuse, ranks=2, args=(make,), keep_workers=True)
    for outcome in outcomes:
        assert outcome.error == "PipelineError"
        assert re.search(text, outcome.message)
