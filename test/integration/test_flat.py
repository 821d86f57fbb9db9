"""After the first step nothing is compiled, gathered or read back, for many steps."""

from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as metrics
from integration.test_parity import SCHEDULES
from integration.training import COUNTERS, Job, batch, run_step, start
from joining import join
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B

import torch_xla_pp as xpp
from torch_xla_pp import xla_compat
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

NUM_STEPS = 50
# Samples of these metrics are transfers to the host.
METRICS = ("TransferFromDeviceTime", "InboundData")


def counts() -> dict[str, int]:
    found = {name: metrics.counter_value(name) or 0 for name in COUNTERS}
    for name in METRICS:
        found[name] = (metrics.metric_data(name) or (0,))[0]
    return found


def growth(schedule: str, num_microbatches: int) -> dict[str, int]:
    """Return what grew in all steps but the first two."""
    job = Job(
        schedule=schedule,
        frontend="manual",
        num_microbatches=num_microbatches,
        rows=2 * num_microbatches,
    )
    stages, runner = start(job)
    before: dict[str, int] = {}
    for step in range(NUM_STEPS):
        if step == 2:
            before = counts()
        run_step(job, runner, stages, *batch(job, step))
        for stage in stages:
            stage.submod.zero_grad()
    after = counts()
    return {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize(
    ("schedule", "num_microbatches"),
    [("GPipe", 2), ("1F1B", 2), *((name, 32) for name in SCHEDULES)],
)
def test_nothing_grows_in_fifty_steps(
    worlds: Worlds, schedule: str, num_microbatches: int
) -> None:
    for grown in worlds.run(growth, ranks=2, args=(schedule, num_microbatches)):
        assert set(grown.values()) == {0}, grown


def programs_of_equal_stages(width: int, dropout: float) -> int:
    """Return how many programs a rank compiled for its equal stages."""
    rank = join().rank()
    torch.manual_seed(0)
    stages = [
        xpp.PipelineStage(
            nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout)),
            index,
            num_stages=6,
            device=xpp.device(),
        )
        for index in range(rank, 6, 2)
    ]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.MSELoss())
    before = metrics.counter_value("UncachedCompile") or 0
    x = torch.randn(8, width)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x, losses=[])
    return (metrics.counter_value("UncachedCompile") or 0) - before


# Workers keep what they compiled, so that each case needs shapes of its own.
@pytest.mark.parametrize(("width", "dropout"), [(9, 0.0), (10, 0.5)])
def test_equal_stages_of_a_rank_share_their_programs(
    worlds: Worlds, width: int, dropout: float
) -> None:
    arguments = (width, dropout)
    first, last = worlds.run(programs_of_equal_stages, ranks=2, args=arguments)
    # Stages 2 and 4 share a forward and a backward; stage 0 has others, as it neither
    # receives nor sends back; sums begin and end alike everywhere.
    assert first == 6
    # Stages 1 and 3 share theirs; the last one has one program for both and the loss.
    assert last == 2 + 1 + 2


def steps_that_compile(options: dict[str, Any], first: int, last: int) -> list[int]:
    """Return in which of some steps an optimizer's program is compiled."""
    layer = nn.Linear(2, 2).to(xpp.device())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, **options)
    grads = [torch.ones_like(parameter) for parameter in layer.parameters()]

    def compiles() -> bool:
        before = xla_compat.num_compilations()
        for parameter, grad in zip(layer.parameters(), grads, strict=True):
            parameter.grad = grad
        optimizer.step()
        torch_xla.sync()
        return xla_compat.num_compilations() > before

    for _ in range(3):
        compiles()
    for slots in optimizer.state.values():
        slots["step"].fill_(first - 2)
    compiles()
    return [step for step in range(first, last) if compiles()]


def test_an_optimizer_is_compiled_again_where_two_of_its_numbers_become_equal(
    worlds: Worlds,
) -> None:
    """The square root of 1 - 0.999 ** 6212 rounds to 0.999, AdamW's second beta."""
    expected: list[tuple[dict[str, Any], list[int]]] = [
        ({}, [6212]),
        ({"betas": (0.9, 0.998)}, []),
        ({"capturable": True}, []),
    ]
    for options, steps in expected:
        args = (options, 6208, 6216)
        assert worlds.run(steps_that_compile, ranks=1, args=args) == [steps]
