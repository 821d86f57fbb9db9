"""Steps of several kinds (shapes, modes, autocast) and what random numbers follow."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch_xla.debug.metrics as metrics
from joining import join
from logged import logged
from torch import Tensor, nn
from torch.distributed.pipelining import (
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
)
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.runtime.agreement import Agreement
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

WIDTH, MICROBATCHES = 8, 2
COUNTERS = ("UncachedCompile", "CreateCompileHandles")


class Mixing(nn.Module):
    """A mix along the length, so that a padded program would be noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).softmax(dim=1) * x.shape[1] + x


def two_stages(module: nn.Module) -> tuple[Any, Any]:
    stage = xpp.PipelineStage(module, dist.get_rank(), 2, xpp.device())
    return stage, ScheduleGPipe(stage, MICROBATCHES, loss_fn=F.mse_loss)


def call(function: Any, stage: Any, x: Tensor, y: Tensor) -> Any:
    if stage.is_first:
        return function(x)
    losses: list[Tensor] = []
    return function(target=y.to(xpp.device()), losses=losses)


def counters() -> dict[str, int]:
    return {name: metrics.counter_value(name) or 0 for name in COUNTERS}


def train_with_shapes(
    shapes: list[tuple[int, int]],
) -> tuple[dict[str, float], dict[str, int]]:
    """Train and evaluate with every shape twice; count compilations in round two."""
    torch.manual_seed(0)
    parts = nn.Sequential(Mixing(), Mixing())
    reference = copy.deepcopy(parts)
    group = join()
    stage, schedule = two_stages(parts[group.rank()])
    errors = {"grads": 0.0, "outputs": 0.0}
    before = counters()
    for number in range(2 * len(shapes)):
        if number == len(shapes):
            before = counters()
        rows, length = shapes[number % len(shapes)]
        torch.manual_seed(number)
        x, y = torch.randn(2, rows, length, WIDTH)
        with torch.no_grad():
            scored = call(schedule.eval, stage, x, y)
        call(schedule.step, stage, x, y)
        for part_x, part_y in zip(
            x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True
        ):
            (F.mse_loss(reference(part_x), part_y) / MICROBATCHES).backward()
        if scored is not None:
            error = float((scored.cpu() - reference(x)).abs().max())
            errors["outputs"] = max(errors["outputs"], error)
    for got, expected in zip(
        stage.submod.parameters(), reference[group.rank()].parameters(), strict=True
    ):
        error = float((got.grad.cpu() - expected.grad).abs().max())
        errors["grads"] = max(errors["grads"], error)
    after = counters()
    return errors, {name: after[name] - before[name] for name in COUNTERS}


def test_batch_size_and_length_may_change_from_step_to_step(worlds: Worlds) -> None:
    shapes = [(4, 3), (8, 3), (4, 5)]
    for errors, compiled in worlds.run(train_with_shapes, ranks=2, args=(shapes,)):
        assert errors["grads"] < 1e-5
        assert errors["outputs"] < 1e-5
        assert compiled == dict.fromkeys(COUNTERS, 0)


def many_shapes() -> list[str]:
    join()
    stage, schedule = two_stages(nn.Identity())
    with logged() as texts:
        for rows in range(2, 22, 2):
            call(schedule.eval, stage, torch.zeros(rows, 1), torch.zeros(rows, 1))
        # Rank 0 has the store, which says what kind of step comes.
        dist.barrier()
    return texts


def test_many_shapes_are_warned_of(worlds: Worlds) -> None:
    for rank, texts in enumerate(worlds.run(many_shapes, ranks=2)):
        assert texts[0].startswith(f"stage {rank}: programs for 9 kinds of steps")
        assert len(texts) == 2


class Dropping(nn.Module):
    """Layers with dropout, with the weights of one model."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = F.dropout(x + 1, 0.5)
        return x


def failed_between() -> list[str]:
    """Fail when rank 0 knows the first kind and rank 1 does not; then train."""
    join()
    stage, schedule = two_stages(nn.Linear(4, 4))
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    agree, outcomes = Agreement.exchange_tilings, list[str]()

    def agree_and_fail(agreement: Agreement, own: Any) -> Any:
        found = agree(agreement, own)
        if dist.get_rank() == 1 and not outcomes:
            raise ValueError("after the exchange")
        return found

    with mock.patch.object(Agreement, "exchange_tilings", agree_and_fail):
        for _ in range(3):
            try:
                call(schedule.step, stage, x, y)
            except ValueError:
                outcomes.append("error")
            else:
                outcomes.append("well")
    return outcomes


def test_a_kind_that_some_ranks_know_is_agreed_on_again(worlds: Worlds) -> None:
    found = worlds.run(failed_between, ranks=2, devices=1, timeout_s=60)
    assert found == [["error", "well", "well"]] * 2


def masked(split: tuple[int, ...]) -> Tensor | None:
    """Return what two steps of a model of several dropouts put out."""
    rank = join().rank()
    torch.manual_seed(3)
    indices = range(rank, len(split), 2)
    stages = [
        xpp.PipelineStage(Dropping(split[i]), i, len(split), xpp.device())
        for i in indices
    ]
    # Nothing has a gradient, so the last stage needs no loss.
    if len(split) == 2:
        schedule: Any = ScheduleGPipe(stages[0], 4)
    else:
        schedule = ScheduleInterleaved1F1B(stages, 4)
    outputs = []
    for _ in range(2):
        args = (torch.zeros(16, 32),) if rank == 0 else ()
        outputs.append(schedule.eval(*args))
    return None if outputs[0] is None else torch.cat([o.cpu() for o in outputs])


def test_dropout_does_not_depend_on_split_schedule_or_devices(worlds: Worlds) -> None:
    def run(split: tuple[int, ...], devices: int) -> Tensor:
        found = worlds.run(masked, ranks=2, devices=devices, args=(split,))[1]
        assert isinstance(found, Tensor)
        return found

    first = run((1, 3), 1)
    assert len(first.unique()) == 5
    assert torch.equal(first, run((2, 2), 1))
    assert torch.equal(first, run((1, 1, 1, 1), 1))
    assert torch.equal(first, run((3, 1), 2))


def train_with_autocast(is_traced: bool) -> tuple[str, float]:
    """Train under autocast, on the outside of the step; then without."""
    torch.manual_seed(0)
    parts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    reference = copy.deepcopy(parts)
    group = join()
    x, y = torch.randn(2, 4, WIDTH)
    if is_traced:
        cut = {"1": SplitPoint.BEGINNING}
        pipe = xpp.pipeline(parts, (x[:2],), split_spec=cut)
        stage = pipe.build_stage(group.rank(), xpp.device(), group)
        schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=F.mse_loss)
    else:
        stage, schedule = two_stages(parts[group.rank()])
    with torch.autocast("xla", dtype=torch.bfloat16):
        output = call(schedule.step, stage, x, y)
    for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(reference(part_x), part_y) / 2
        loss.backward()
    own = reference[group.rank()]
    errors = [
        float((got.grad.cpu() - want.grad).abs().max() / want.grad.abs().max())
        for got, want in zip(stage.submod.parameters(), own.parameters(), strict=True)
    ]
    stage.submod.zero_grad()
    plain = call(schedule.step, stage, x, y)
    return f"{getattr(output, 'dtype', None)} {getattr(plain, 'dtype', None)}", max(
        errors
    )


@pytest.mark.parametrize("is_traced", [False, True])
def test_autocast_is_part_of_the_kind(worlds: Worlds, is_traced: bool) -> None:
    """A traced stage takes what the one before makes under autocast."""
    (_, first), (dtypes, last) = worlds.run(
        train_with_autocast, ranks=2, args=(is_traced,)
    )
    assert dtypes == "torch.bfloat16 torch.float32"
    # One product in bfloat16 is off by up to 2**-8 of the largest term.
    assert max(first, last) < 2e-2
