"""Traced stages are trained and evaluated as the unsplit model is."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds, WorldsFailed

pytestmark = pytest.mark.worlds

WIDTH, ROWS, MICROBATCHES = 4, 8, 2
FACTOR = 1.0


class Model(nn.Module):
    """A model with a batch norm, and other branches in other modes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        # Drops nothing in either mode, so that results can be compared.
        self.drop = nn.Dropout(0.0)
        self.alpha, self.act = 1.0, F.relu

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.drop(self.first(x))) * self.alpha * FACTOR
        if self.training:
            x = x * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return self.second(x).relu()


class Dropping(nn.Module):
    """Dropout of one half."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.drop(self.first(x)), 0.5, self.training))


class Attending(nn.Module):
    """Dropout in attention and between recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.5, batch_first=True)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.unsqueeze(1))).squeeze(1)


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
    return x, y


def two_stages(model: nn.Module) -> tuple[Any, Any, nn.Module]:
    global FACTOR
    FACTOR = 1.0  # workers are used again
    rank = join().rank()
    whole = copy.deepcopy(model)
    example = torch.zeros(ROWS // MICROBATCHES, WIDTH)
    spec = {"second": SplitPoint.BEGINNING}
    pipe = xpp.pipeline(model, mb_args=(example,), split_spec=spec)
    stage = pipe.build_stage(rank, xpp.device())
    return stage, ScheduleGPipe(stage, MICROBATCHES, loss_fn=F.mse_loss), whole


def call(function: Any, stage: Any, number: int) -> Any:
    x, y = batch(number)
    if stage.is_first:
        return function(x)
    return function(target=y, losses=[])


def difference(got: Tensor | None, want: Tensor | None) -> float:
    if got is None or want is None:
        return 0.0 if got is want else float("inf")
    error = (got.detach().cpu() - want.detach()).abs().max()
    return float(error / (1 + want.detach().abs().max()))


def switched(modes: tuple[bool, ...]) -> dict[str, float]:
    """Train and evaluate in each of some modes; return what differs from eager."""
    torch.manual_seed(0)
    stage, schedule, whole = two_stages(Model().train(modes[0]))
    found = {}
    for number, training in enumerate(modes):
        stage.submod.train(training)
        whole.train(training)
        call(schedule.step, stage, number)
        x, y = batch(number)
        for part, target in zip(
            x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True
        ):
            (F.mse_loss(whole(part), target) / MICROBATCHES).backward()
        named = dict(whole.named_parameters())
        for name, own in stage.submod.named_parameters():
            found[f"{number}: {name}"] = difference(own.grad, named[name].grad)
        held = dict(whole.named_buffers())
        for name, own in stage.submod.named_buffers():
            if name in held:
                found[f"{number}: {name}"] = difference(own, held[name])
        stage.submod.zero_grad()
        whole.zero_grad()
        stage.submod.eval()
        whole.eval()
        got = call(schedule.eval, stage, number)
        if got is not None:
            found[f"{number}: output"] = difference(got, whole(x))
    return found


@pytest.mark.parametrize("modes", [(True, False, True), (False, True, False)])
def test_results_equal_the_unsplit_models_in_both_modes(
    worlds: Worlds, modes: tuple[bool, ...]
) -> None:
    for found in worlds.run(switched, ranks=2, args=(modes,)):
        assert found
        assert {name: error for name, error in found.items() if not error < 2e-5} == {}


def evaluate_dropping(
    make: Callable[[], nn.Module], training: bool
) -> list[float] | None:
    """Return how far outputs are from those in evaluation, in both modes, twice."""
    torch.manual_seed(0)
    stage, schedule, whole = two_stages(make().train(training))
    whole.eval()
    expected = whole(batch(0)[0])
    found = []
    for flag in (True, False, True, False):
        stage.submod.train(flag)
        got = call(schedule.eval, stage, 0)
        if got is None:
            continue
        found.append(difference(got, expected))
    return found


@pytest.mark.parametrize("make", [Dropping, Attending])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_switched_on_and_off(
    worlds: Worlds, make: Callable[[], nn.Module], training: bool
) -> None:
    found = worlds.run(evaluate_dropping, ranks=2, args=(make, training))[1]
    on, off, on_again, off_again = found
    assert max(off, off_again) < 1e-5
    assert min(on, on_again) > 1e-2


class Other(Model):
    """A model that sends another number of values in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        return y + x if self.training else y


class Untraceable(Model):
    """A model that can be traced only in training."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and x.sum() > 0:
            return x
        return self.second(self.first(x))


class Plain(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)) * self.alpha * FACTOR)


class Scaled(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Shifted(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


def set_factor(_: Any, model: nn.Module) -> None:
    global FACTOR
    FACTOR = 2.0


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "eval": lambda stage, _: stage.submod.eval(),
    "a part": lambda stage, _: stage.submod.get_submodule("norm").eval(),
    "p": lambda stage, _: setattr(stage.submod.get_submodule("first"), "p", 0.5),
    "a hook": lambda stage, _: stage.submod.get_submodule(
        "first"
    ).register_forward_hook(print),
    "alpha": lambda _, model: setattr(model, "alpha", 2.0),
    "a function": lambda _, model: setattr(model, "act", F.silu),
    "a global": set_factor,
    "a hook of the model": lambda _, model: model.first.register_forward_hook(print),
    "another part": lambda _, model: setattr(model, "second", nn.Linear(WIDTH, WIDTH)),
    "a parameter": lambda _, model: setattr(
        model.second, "weight", nn.Parameter(torch.zeros(WIDTH, WIDTH))
    ),
    "a tensor": lambda _, model: setattr(model, "shift", torch.ones(WIDTH)),
    "a buffer's values": lambda _, model: model.load_state_dict(model.state_dict()),
    "a tensor's values": lambda _, model: model.shift.fill_(1),
}


def change(make: Callable[[], nn.Module], what: str) -> None:
    model = make()
    stage, schedule, _ = two_stages(model)
    call(schedule.step, stage, 0)
    if stage.is_first:
        CHANGES[what](stage, model)
    call(schedule.step, stage, 1)


@pytest.mark.parametrize(
    ("make", "what", "text"),
    [
        (Other, "eval", "got evaluation mode. .*other values go between the stages"),
        (Untraceable, "eval", "got evaluation mode. The model cannot be traced so"),
        (Model, "a part", "got norm in evaluation"),
        (Plain, "p", "got changes: first.p: nothing -> 0.5"),
        (Plain, "a hook", r"got changes: first._forward_hooks\[0\]"),
        (Plain, "alpha", "got changes: alpha: 1.0 -> 2.0. Call pipeline again"),
        (Plain, "a function", "got changes: act: relu -> silu"),
        (Plain, "a global", "got changes: global FACTOR: 1.0 -> 2.0"),
        (Plain, "a hook of the model", r"got changes: first._forward_hooks\[0\]"),
        (Plain, "another part", "got changes: second is another one, second.weight"),
        (Plain, "a parameter", "got changes: second.weight is another one. "),
        (Scaled, "a buffer's values", "got others written to scale. .*stage.submod"),
        (Shifted, "a tensor", "got changes: shift is another one. "),
        (Shifted, "a tensor's values", "got changes: shift was written to. "),
    ],
)
def test_what_a_trace_has_built_in_is_refused_by_name(
    worlds: Worlds, make: Callable[[], nn.Module], what: str, text: str
) -> None:
    with pytest.raises(WorldsFailed, match=text):
        worlds.run(change, ranks=2, args=(make, what), keep_workers=True)


def thaw() -> dict[str, float]:
    """Freeze and thaw parts of traced stages; return what differs from eager."""
    torch.manual_seed(0)
    stage, schedule, whole = two_stages(Plain())
    found = {}
    layers = [("first.weight", "first.bias"), ("second.bias",), ("first.bias",), ()]
    for number, frozen in enumerate(layers):
        for module in (stage.submod, whole):
            for name, value in module.named_parameters():
                value.requires_grad_(name not in frozen)
        call(schedule.step, stage, number)
        x, y = batch(number)
        F.mse_loss(whole(x), y).backward()
        named = dict(whole.named_parameters())
        for name, own in stage.submod.named_parameters():
            found[f"{number}: {name}"] = difference(own.grad, named[name].grad)
        stage.submod.zero_grad()
        whole.zero_grad()
    return found


def test_parameters_of_traced_stages_are_frozen_and_thawed(worlds: Worlds) -> None:
    for found in worlds.run(thaw, ranks=2):
        assert found
        assert {name: error for name, error in found.items() if not error < 2e-5} == {}
