"""What a stage's forward reads from Python may change between two steps."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla.debug.metrics as metrics
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp import cpu, xla_compat
from torch_xla_pp.testing import Worlds, WorldsFailed

pytestmark = pytest.mark.worlds

WIDTH, ROWS, MICROBATCHES = 4, 16, 2
COUNTERS = ("UncachedCompile", "CreateCompileHandles")
FACTOR = 1.0


class Config:
    factor = 1.0


class Reading(nn.Module):
    """A module that reads all kinds of values."""

    power = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.config = Config()
        self.alpha, self.is_scaled, self.items = 1.0, False, [1.0, 2.0]
        self.table = {"scale": 1.0}
        self.act = F.relu
        self.plain = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x)) * self.alpha * FACTOR * self.config.factor
        x = self.helped(x)
        return self.layer_norm(self.norm(self.second(x)))

    def helped(self, x: Tensor) -> Tensor:
        if self.is_scaled:
            x = x * 2
        x = x * self.items[1] * self.table["scale"] + self.power
        return x * getattr(self, "plain").to(x.device)  # noqa: B009


Change = Callable[[nn.Module], Any]


def set_factor(module: nn.Module) -> None:
    global FACTOR
    FACTOR = 0.5


CHANGES: dict[str, Change] = {
    "a number": lambda m: setattr(m, "alpha", 0.25),
    "an int for a float": lambda m: setattr(m, "alpha", 2),
    "a flag": lambda m: setattr(m, "is_scaled", True),
    "an item of a list": lambda m: m.items.__setitem__(1, 3.0),
    "an item of a dict": lambda m: m.table.__setitem__("scale", 3.0),
    "an attribute of an object": lambda m: setattr(m.config, "factor", 3.0),
    "a value of the class": lambda m: setattr(m, "power", 3.0),
    "a function": lambda m: setattr(m, "act", F.silu),
    "a tensor that is no buffer": lambda m: setattr(m, "plain", torch.tensor(3.0)),
    "a global": set_factor,
    "training of a submodule": lambda m: m.norm.eval(),
    "momentum": lambda m: setattr(m.norm, "momentum", 0.9),
    "eps": lambda m: setattr(m.layer_norm, "eps", 0.5),
    "a frozen layer": lambda m: m.first.requires_grad_(False),
    "a frozen parameter": lambda m: m.second.weight.requires_grad_(False),
    "all frozen": lambda m: m.requires_grad_(False),
    "all thawed": lambda m: m.requires_grad_(True),
    "a hook": lambda m: m.second.register_forward_hook(lambda _m, _a, y: y * 2),
    "an evaluated module": lambda m: m.eval(),
}


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
    return x, y


def counters() -> dict[str, int]:
    return {name: metrics.counter_value(name) or 0 for name in COUNTERS}


def step(schedule: Any, stage: Any, number: int) -> list[Tensor]:
    x, y = batch(number)
    args = (x,) if stage.is_first else ()
    losses: list[Tensor] = []
    more = {"target": y.to(xpp.device()), "losses": losses} if stage.is_last else {}
    schedule.step(*args, **more)
    return losses


def eager_step(whole: nn.Module, number: int) -> list[Tensor]:
    x, y = batch(number)
    losses = []
    for part_x, part_y in zip(
        x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True
    ):
        losses.append(F.mse_loss(whole(part_x), part_y))
        if losses[-1].requires_grad:
            (losses[-1] / MICROBATCHES).backward()
    return losses


def differences(
    stage: Any, reference: nn.Module, losses: list[Tensor], expected: list[Tensor]
) -> dict[str, float]:
    """Return what differs of losses, parameters, gradients and buffers."""
    found = {}
    pairs: list[tuple[str, Any, Any]] = [
        (f"loss {i}", got, want)
        for i, (got, want) in enumerate(zip(losses, expected, strict=False))
    ]
    ours, theirs = stage.submod.state_dict(), reference.state_dict()
    pairs += [(name, ours[name], want) for name, want in theirs.items()]
    named = dict(reference.named_parameters())
    for name, own in stage.submod.named_parameters():
        pairs.append((f"grad of {name}", own.grad, named[name].grad))
    for name, got, want in pairs:
        if got is None or want is None:
            difference = 0.0 if got is want else float("inf")
        else:
            error = (got.detach().cpu() - want.detach()).abs().max()
            difference = float(error / (1 + want.detach().abs().max()))
        # Each batch norm makes gradients some ten times as inexact as float32.
        if not difference < 1e-4:
            found[name] = difference
    return found


def changed(
    names: tuple[str, ...], stages: int = 1, is_joined: bool = True
) -> dict[str, Any]:
    """Train; before some steps change something. Return what differs from eager.

    Of several stages the last one is changed alone. Its forward may be one program with
    its backward.
    """
    global FACTOR
    FACTOR = 1.0
    rank = join().rank()
    torch.manual_seed(0)
    parts = nn.Sequential(*(Reading() for _ in range(stages)))
    whole = copy.deepcopy(parts)
    with pytest.MonkeyPatch.context() as patch:
        if not is_joined:
            patch.setattr(cpu, "most_joined_bytes", lambda: 0)
        stage = xpp.PipelineStage(parts[rank], rank, stages, xpp.device())
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=F.mse_loss)
    faults: dict[str, Any] = {}
    number = 0
    for name in ("nothing", *names):
        change = CHANGES.get(name, lambda _: None)
        change(whole[-1])
        # All ranks share what is global; here, each has its own.
        if rank == stages - 1:
            change(stage.submod)
        for again in range(2):
            before = counters()
            number += 1
            losses = step(schedule, stage, number)
            expected = eager_step(whole, number)
            if again and (grown := counters()) != before:
                faults[f"{name}: compiled"] = (before, grown)
            found = differences(stage, whole[rank], losses, expected)
            if found:
                faults[f"{name}, step {again}"] = found
            whole.zero_grad()
            stage.submod.zero_grad()
    FACTOR = 1.0
    return faults


@pytest.mark.parametrize("is_joined", [False, True])
def test_results_equal_eager_after_changes(worlds: Worlds, is_joined: bool) -> None:
    args = (tuple(CHANGES), 1, is_joined)
    (faults,) = worlds.run(changed, ranks=1, args=args, timeout_s=240)
    assert faults == {}


def test_one_stage_may_change_alone(worlds: Worlds) -> None:
    names = ("a number", "training of a submodule", "all frozen", "all thawed")
    for faults in worlds.run(changed, ranks=2, args=(names, 2), timeout_s=240):
        assert faults == {}


def handles_around_a_step() -> tuple[list[int], list[int]]:
    join()
    stage = xpp.PipelineStage(nn.Linear(WIDTH, WIDTH), 0, 1, xpp.device())
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=F.mse_loss)
    parameters = [*stage.submod.parameters()]
    before = xla_compat.data_handles(parameters)
    step(schedule, stage, 0)
    return before, xla_compat.data_handles(parameters)


def test_the_first_step_on_one_device_moves_no_parameter(worlds: Worlds) -> None:
    ((before, after),) = worlds.run(handles_around_a_step, ranks=1, devices=1)
    assert before == after


class Counting(nn.Module):
    """A counter of its calls, which programs cannot count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


class Caching(Counting):
    """A module that caches a value when it is first called."""

    mask: Tensor | None = None
    length: int = 0

    def forward(self, x: Tensor) -> Tensor:
        self.length = max(self.length, x.shape[1])
        if self.mask is None:
            self.mask = torch.ones(self.length, device=x.device)
        return self.linear(x) * self.mask


class Replacing(nn.Module):
    """A module that replaces a buffer by new tensors."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return x + self.mean


class Rescaling(nn.Module):
    """A module whose backward reads what its forward wrote to a buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(1.1)
        return self.linear(x) * self.scale


def growing() -> nn.Module:
    return Replacing(1)


def compiled() -> nn.Module:
    inner = torch.compile(nn.Linear(WIDTH, WIDTH), backend="aot_eager")
    return nn.Sequential(inner, nn.Tanh())


def one_stage(module: nn.Module) -> tuple[Any, Any]:
    stage = xpp.PipelineStage(module, 0, 1, xpp.device())
    return stage, ScheduleGPipe(stage, MICROBATCHES, loss_fn=F.mse_loss)


def train_twice(make: Callable[[], nn.Module]) -> dict[str, float]:
    join()
    whole = make()
    stage, schedule = one_stage(copy.deepcopy(whole))
    for number in range(3):
        stage.submod.zero_grad(), whole.zero_grad()
        losses = step(schedule, stage, number)
        expected = eager_step(whole, number)
    return differences(stage, whole, losses, expected)


def test_a_forward_that_counts_is_refused(worlds: Worlds) -> None:
    text = r"leaves Python values as they are, got changes: calls: \d+ -> \d+"
    with pytest.raises(WorldsFailed, match=text):
        worlds.run(train_twice, ranks=1, args=(Counting,), keep_workers=True)


def test_a_forward_may_put_a_tensor_in_the_place_of_a_buffer(worlds: Worlds) -> None:
    assert worlds.run(train_twice, ranks=1, args=(Replacing,)) == [{}]


def test_a_backward_may_read_what_a_buffer_has_become(worlds: Worlds) -> None:
    assert worlds.run(train_twice, ranks=1, args=(Rescaling,)) == [{}]


def test_a_part_that_torch_compile_has_wrapped_is_run(worlds: Worlds) -> None:
    assert worlds.run(train_twice, ranks=1, args=(compiled,)) == [{}]


def test_a_buffer_keeps_its_shape(worlds: Worlds) -> None:
    text = r"leave buffer mean torch.float32 \[1\], got torch.float32 \[4\]"
    with pytest.raises(WorldsFailed, match=text):
        worlds.run(train_twice, ranks=1, args=(growing,), keep_workers=True)


def test_a_forward_may_keep_what_it_first_computes(worlds: Worlds) -> None:
    assert worlds.run(train_twice, ranks=1, args=(Caching,)) == [{}]


class Annealed(nn.Module):
    """A module with nothing to train at first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.p = nn.Linear(WIDTH, WIDTH).requires_grad_(False), 0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), self.p)


def change_alone(what: str) -> None:
    rank = join().rank()
    stage = xpp.PipelineStage(Annealed(), rank, 3, xpp.device())
    if stage.is_last:
        stage.submod.requires_grad_(True)
    schedule = ScheduleGPipe(stage, 4, loss_fn=F.mse_loss)
    step(schedule, stage, 0)
    if rank == 1:
        if what == "thaw":
            stage.submod.requires_grad_(True)
        else:
            stage.submod.p = 0.0
    step(schedule, stage, 1)


def test_what_other_stages_must_know_is_refused_by_name(worlds: Worlds) -> None:
    text = "stage 1: .* expected 1 random operations, .* got 0"
    with pytest.raises(WorldsFailed, match=text):
        worlds.run(change_alone, ranks=3, args=("p",), keep_workers=True)
    with pytest.raises(WorldsFailed, match="stage 1: its outputs need gradients now"):
        worlds.run(change_alone, ranks=3, args=("thaw",), keep_workers=True)
