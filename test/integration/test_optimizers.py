"""Optimizers of the unsplit model's parameters train the stages."""

import copy
from typing import Any

import pytest
import torch
import torch_xla
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleZBVZeroBubble,
    SplitPoint,
)
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds, WorldsFailed

pytestmark = pytest.mark.worlds

WIDTH, ROWS, MICROBATCHES = 4, 8, 4


class Model(nn.Module):
    """Four layers; the last one has the weight of the first."""

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        if is_tied:
            self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def stages_of(model: Model, frontend: str, indices: list[int], count: int) -> list[Any]:
    """Make stages of equal numbers of layers."""
    size = 4 // count
    if frontend == "traced":
        spec = {f"layers.{i}": SplitPoint.BEGINNING for i in range(size, 4, size)}
        device = model.layers[0].weight.device
        example = torch.zeros(ROWS // MICROBATCHES, WIDTH, device=device)
        pipe = xpp.pipeline(model, mb_args=(example,), split_spec=spec)
        return [pipe.build_stage(i, xpp.device()) for i in indices]
    is_tied = model.layers[0].weight is model.layers[3].weight
    tied: dict[int, dict[str, str]] = {}
    if is_tied:
        tied = {0: {"0.weight": "w"}, count - 1: {f"{size - 1}.weight": "w"}}
    return [
        xpp.PipelineStage(
            nn.Sequential(*model.layers[i * size : (i + 1) * size]),
            i,
            count,
            xpp.device(),
            tied=tied.get(i),
        )
        for i in indices
    ]


def deferred(is_tied: bool) -> Model:
    with xpp.deferred_init():
        return Model(is_tied)


def made(when: str, is_tied: bool) -> tuple[Model, Model]:
    """Return a model, and an equal one to split."""
    torch.manual_seed(0)
    if when == "deferred":
        return xpp.materialize(deferred(is_tied)), deferred(is_tied)
    whole = Model(is_tied)
    model = copy.deepcopy(whole)
    return whole, model.to(xpp.device()) if when == "on device" else model


def train(frontend: str, when: str, is_tied: bool, ranks: int) -> dict[str, float]:
    """Train some steps; return what differs from eager."""
    rank = join().rank()
    whole, model = made(when, is_tied)
    optimizer, expected_optimizer = optimizer_of(model), optimizer_of(whole)
    if when == "with state":
        for own, module in ((optimizer, model), (expected_optimizer, whole)):
            module(torch.ones(1, WIDTH)).sum().backward()
            own.step()
            own.zero_grad()
    is_looped = is_tied or ranks == 1
    count = 2 * ranks if is_looped else ranks
    indices = [rank, count - 1 - rank] if is_looped else [rank]
    stages = stages_of(model, frontend, indices, count)
    if when == "with state":
        optimizer.load_state_dict(optimizer.state_dict())
    if when == "after":
        optimizer = optimizer_of(model)
    if when == "of stages":
        parameters = [p for stage in stages for p in stage.submod.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=0.05)
    schedule: Any
    if is_looped:
        schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=F.mse_loss)
    else:
        schedule = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=F.mse_loss)
    found = {}
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
        losses: list[Tensor] = []
        is_last = any(stage.is_last for stage in stages)
        more = {"target": y, "losses": losses} if is_last else {}
        schedule.step(*((x,) if rank == 0 else ()), **more)
        expected = F.mse_loss(whole(x), y)
        expected.backward()
        if is_last:
            mean = torch.stack([loss.detach().cpu() for loss in losses]).mean()
            found[f"loss {number}"] = float((mean - expected).abs())
        for own in (optimizer, expected_optimizer):
            own.step()
            own.zero_grad()
        torch_xla.sync()
    held = {id(p) for stage in stages for p in stage.submod.parameters()}
    # A second copy on a rank takes over the value of the first in the next step.
    trained = held & {
        id(p) for group in optimizer.param_groups for p in group["params"]
    }
    theirs = dict(whole.named_parameters(remove_duplicate=False))
    for name, value in model.named_parameters(remove_duplicate=False):
        if id(value) in trained:
            error = (value.detach().cpu() - theirs[name].detach()).abs().max()
            found[name] = float(error)
        elif (
            id(value) not in held and value.device.type == "xla" and when != "on device"
        ):
            found[f"{name} is on the device"] = float("inf")
    return found


@pytest.mark.parametrize(
    ("frontend", "when", "is_tied", "ranks"),
    [
        ("traced", "before", False, 2),
        ("traced", "after", False, 1),
        ("traced", "with state", False, 1),
        ("traced", "on device", False, 1),
        ("traced", "deferred", False, 2),
        ("traced", "before", True, 1),
        ("traced", "of stages", True, 1),
        ("traced", "before", True, 2),
        ("manual", "before", False, 2),
        ("manual", "before", True, 1),
        ("manual", "of stages", True, 1),
        ("manual", "deferred", True, 1),
        ("manual", "on device", False, 1),
    ],
)
def test_training_equals_that_of_the_unsplit_model(
    worlds: Worlds, frontend: str, when: str, is_tied: bool, ranks: int
) -> None:
    for found in worlds.run(train, ranks=ranks, args=(frontend, when, is_tied, ranks)):
        assert found
        assert {name: error for name, error in found.items() if not error < 1e-4} == {}


def share_without_a_name() -> None:
    join()
    model = Model(is_tied=True)
    stages = [
        xpp.PipelineStage(model.layers[2 * i : 2 * i + 2], i, 2, xpp.device())
        for i in range(2)
    ]
    ScheduleZBVZeroBubble(stages, 2).step(torch.zeros(2, WIDTH))


def test_a_parameter_of_two_stages_must_have_a_name(worlds: Worlds) -> None:
    text = "got one object for 0.weight of stage 0 and 3.weight of stage 1"
    with pytest.raises(WorldsFailed, match=text):
        worlds.run(share_without_a_name, ranks=1)
