"""What a stage's module may do, compared with the unsplit model on two ranks."""

import copy
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

CUT = {"second": SplitPoint.BEGINNING}
ROWS, WIDTH, MICROBATCHES = 32, 4, 4


class Turning(nn.Module):
    """The value on the boundary is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(torch.stack([x, 2 * x, 3 * x], dim=1)).transpose(1, 2)
        return self.second(h).sum(dim=1)


class Several(nn.Module):
    """Two values cross the boundary, one of them an integer mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, mask = self.first(x), (x > 0).long()
        return self.second(h) * mask + h


class Tied(nn.Module):
    """One weight is used twice before the cut; one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.first.weight
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.again(self.first(x).relu()))


class Frozen(nn.Module):
    """The first stage has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Normalised(nn.Module):
    """Batch norms, whose buffers follow the order of the microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Tracking(nn.Module):
    """Buffers that are written without gradients, in both of the usual ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.last.copy_(h.mean(0))
        return self.second(h + self.mean + self.last)


class Constant(nn.Module):
    """Tensors that are made inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * torch.arange(WIDTH, device=x.device)
        table = torch.tensor([[1.0, -1.0, 0.5, 2.0]], device=x.device)
        return self.second(h + table)


class Scaled(torch.autograd.Function):
    """A function with tensors of its own, and a backward that is no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.arange(WIDTH, device=x.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad + 3 * x * torch.arange(WIDTH, device=x.device)


class Attending(nn.Module):
    """The host has other strides than devices, and the host's are in the trace.

    An attention's result has the strides of its query there; a device is an argument by
    position; an activation is no part of the module that calls it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = Heads()
        self.second = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = turned(self.first(x))
        return self.second(h * torch.arange(WIDTH).to(h.device, h.dtype))


def turned(x: Tensor) -> Tensor:
    """Rotate pairs of numbers, as rotary embeddings do by complex products."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    angles = torch.arange(1.0, 1 + WIDTH // 2, device=x.device)
    return torch.view_as_real(pairs * torch.polar(torch.ones(1), angles)).flatten(-2)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.qkv(x).view(3, len(x), 2, 2, WIDTH // 2).transpose(2, 3)
        seen = F.scaled_dot_product_attention(*rows)
        seen = seen.transpose(1, 2).contiguous().view(len(x), 2, WIDTH)
        return SILU(Scaled.apply(seen[:, 0] - seen[:, 1]))


SILU = nn.SiLU()


def data(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
    return x, y


def start() -> Any:
    dist.init_process_group("xla_pp")
    torch.manual_seed(0)
    shape = 2, int(os.environ["CPU_NUM_DEVICES"])
    return xpp.init_device_mesh("xla", shape, mesh_dim_names=("pp", "data"))


def step(schedule: Any, stage: Any, x: Tensor, y: Tensor, **kwargs: Any) -> Any:
    if stage.is_first:
        return schedule.step(x, **kwargs)
    return schedule.step(target=y.to(xpp.device()), losses=[])


def differences(stage: Any, reference: nn.Module) -> dict[str, float]:
    """Return the largest difference of each gradient and buffer of a stage."""
    found = {}
    expected = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in stage.submod.named_parameters():
        grad = expected[name].grad
        if grad is None or parameter.grad is None:
            found[name] = 0.0 if grad is parameter.grad else float("inf")
        else:
            found[name] = float((parameter.grad.cpu() - grad).abs().max())
    buffers = dict(reference.named_buffers())
    for name, buffer in stage.submod.named_buffers():
        if name in buffers:
            found[name] = float((buffer.cpu() - buffers[name]).abs().max())
    return found


def train_traced(make: Callable[[], nn.Module], num_steps: int) -> dict[str, float]:
    """Train without zeroing gradients, so that they add up over the steps."""
    mesh = start()
    reference = make()
    model = copy.deepcopy(reference)
    example = torch.zeros(ROWS // MICROBATCHES, WIDTH)
    pipe = xpp.pipeline(model, mb_args=(example,), split_spec=CUT)
    rank = mesh.get_local_rank("pp")
    stage = pipe.build_stage(rank, xpp.device(), mesh=mesh["data"])
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)
    for number in range(num_steps):
        x, y = data(number)
        step(schedule, stage, x, y)
        for part_x, part_y in zip(
            x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True
        ):
            loss = F.mse_loss(reference(part_x), part_y)
            (loss / MICROBATCHES).backward()
    return differences(stage, reference)


# One device saves in the memory of earlier values, and exchanges bundles.
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    "make", [Turning, Several, Tied, Frozen, Normalised, Tracking, Constant, Attending]
)
def test_gradients_and_buffers_equal_the_unsplit_models(
    worlds: Worlds, make: Callable[[], nn.Module], devices: int
) -> None:
    for found in worlds.run(train_traced, ranks=2, devices=devices, args=(make, 2)):
        assert found
        assert {name: d for name, d in found.items() if not d < 2e-5} == {}


class WithKeywords(nn.Module):
    """A stage that takes a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor, power: int = 1) -> Tensor:
        return self.linear(x) * scale**power


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([WithKeywords(), WithKeywords()])


def train_with_keywords() -> dict[str, float]:
    mesh = start()
    reference = Whole()
    rank = mesh.get_local_rank("pp")
    part = copy.deepcopy(reference.parts[rank])
    stage = xpp.PipelineStage(part, rank, 2, xpp.device(), mesh=mesh["data"])
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=F.mse_loss)
    (x, y), (scale, _) = data(), data(5)
    for _ in range(2):
        if rank == 0:
            schedule.step(x, scale=scale, power=2)
        else:
            target = y.to(xpp.device())
            schedule.step(target=target, losses=[], scale=scale, power=2)
    chunks = (value.chunk(MICROBATCHES) for value in (x, y, scale))
    for part_x, part_y, part_scale in zip(*chunks, strict=True):
        for module in reference.parts:
            part_x = module(part_x, part_scale, 2)
        (2 * F.mse_loss(part_x, part_y) / MICROBATCHES).backward()
    return differences(stage, reference.parts[rank])


def test_keyword_arguments_reach_every_stage(worlds: Worlds) -> None:
    for found in worlds.run(train_with_keywords, ranks=2, devices=2):
        assert {name: d for name, d in found.items() if not d < 2e-5} == {}


class Dropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=self.training)


def drop(seed: int) -> dict[str, Any]:
    """Return the masks of both microbatches in training, and the eval output."""
    mesh = start()
    torch.manual_seed(seed)
    rank = mesh.get_local_rank("pp")
    stage = xpp.PipelineStage(Dropping(), rank, 2, xpp.device(), mesh=mesh["data"])
    schedule = ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)
    x = torch.ones(64, 32)
    trained = step(schedule, stage, x, x)
    again = step(schedule, stage, x, x)
    stage.submod.eval()
    args = (x,) if rank == 0 else ()
    target = {} if rank == 0 else {"target": x.to(xpp.device()), "losses": []}
    kept = schedule.eval(*args, **target)
    outputs = (trained, again, kept)
    return {"outputs": [None if t is None else t.cpu() for t in outputs]}


def test_dropout_differs_by_microbatch_stage_and_step_and_is_off_in_eval(
    worlds: Worlds,
) -> None:
    first, again, kept = worlds.run(drop, ranks=2, devices=2, args=(1,))[1]["outputs"]
    # Two stages drop half each, with masks of their own: a quarter is left.
    assert abs((first != 0).float().mean() - 0.25) < 0.05
    assert set(first.unique().tolist()) == {0.0, 4.0}
    assert not torch.equal(*first.chunk(2))
    assert not torch.equal(first, again)
    assert torch.equal(kept, torch.ones(64, 32))
    same, _, _ = worlds.run(drop, ranks=2, devices=2, args=(1,))[1]["outputs"]
    assert torch.equal(first, same)


def evaluate_late() -> list[float]:
    """Rank 1 evaluates long after rank 0 has sent its part and left."""
    mesh = start()
    rank = mesh.get_local_rank("pp")
    stage = xpp.PipelineStage(nn.Identity(), rank, 2, xpp.device(), mesh=mesh["data"])
    schedule = ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)
    found = []
    for number in range(4):
        x, y = data(number)
        if rank == 0:
            schedule.eval(x)
        else:
            time.sleep(1)
            output = schedule.eval(target=y.to(xpp.device()), losses=[])
            found.append(float((output.cpu() - x).abs().max()))
    return found


def test_a_rank_may_leave_when_it_has_done_its_part(worlds: Worlds) -> None:
    assert worlds.run(evaluate_late, ranks=2, devices=2)[1] == [0.0] * 4


def two_schedules() -> list[float]:
    mesh = start()
    reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    rank = mesh.get_local_rank("pp")
    part = copy.deepcopy(reference[rank])
    stage = xpp.PipelineStage(part, rank, 2, xpp.device(), mesh=mesh["data"])
    training = Schedule1F1B(stage, 4, loss_fn=F.mse_loss)
    scoring = ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)
    found = []
    x, y = data()
    for _ in range(2):
        step(training, stage, x, y)
        args = (x,) if rank == 0 else ()
        target = {} if rank == 0 else {"target": y.to(xpp.device()), "losses": []}
        output = scoring.eval(*args, **target)
        if output is not None:
            found.append(float((output.cpu() - reference(x)).abs().max()))
    return found


def test_a_stage_may_be_driven_by_two_schedules(worlds: Worlds) -> None:
    found = worlds.run(two_schedules, ranks=2, devices=2)[1]
    assert len(found) == 2
    assert max(found) < 1e-5
