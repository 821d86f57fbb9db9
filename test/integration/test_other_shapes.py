"""Traced stages take other batch sizes and lengths than the example's."""

import contextlib
import copy
import threading
from typing import Any

import pytest
import torch
import torch_xla.debug.metrics as debug
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

VOCAB, WIDTH, LONGEST, MICROBATCHES = 11, 8, 16, 2


class Mixer(nn.Module):
    """A mix along the length, by a constant that depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.scale = torch.tensor([0.5, 2.0])

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        self.count.add_(length)
        mask = torch.tril(torch.ones(length, length))
        mask = mask / torch.arange(1, length + 1)[:, None]
        parity = torch.tensor([1.0, -1.0]).repeat(length)[:length, None]
        mixed = self.linear(mask.to(x.device) @ self.norm(x)) * self.scale[0]
        return x + F.dropout(mixed, 0.0, self.training) + parity.to(x.device)


class Model(nn.Module):
    def __init__(self, positions: int = LONGEST, *, is_baked: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.randn(positions, WIDTH))
        self.layers = nn.ModuleList(Mixer() for _ in range(2))
        self.is_baked = is_baked

    def forward(self, x: Tensor) -> Tensor:
        position = self.position if self.is_baked else self.position[: x.shape[1]]
        h = self.embed(x) + position
        for layer in self.layers:
            h = layer(h)
        if not self.training:
            h = h * 2
        # Tied over both stages.
        return h @ self.embed.weight.T


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def start(devices: int, *, is_baked: bool = False, is_deferred: bool = False) -> Any:
    """Return a stage of a traced model, its schedule, and the unsplit model."""
    rank = join().rank()
    mesh = xpp.init_device_mesh("xla", (2, devices), mesh_dim_names=("pp", "data"))
    torch.manual_seed(0)
    with xpp.deferred_init() if is_deferred else contextlib.nullcontext():
        model = Model(is_baked=is_baked)
        unsplit = copy.deepcopy(model)
    xpp.materialize(unsplit)
    pipe = xpp.pipeline(
        model,
        mb_args=(torch.zeros(4, LONGEST, dtype=torch.long),),
        split_spec={"layers.1": SplitPoint.BEGINNING},
    )
    stage = pipe.build_stage(rank, xpp.device(), mesh=mesh["data"])
    return stage, Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn), unsplit


def run(call: Any, stage: Any, x: Tensor, y: Tensor) -> Any:
    return call(x) if stage.is_first else call(target=y.to(xpp.device()))


def train(
    shapes: list[tuple[int, int]], devices: int, is_deferred: bool
) -> dict[str, Any]:
    """Evaluate and train with every shape, and again; compare with the unsplit model.

    The optimizer's own program settles after a step of no new kind.
    """
    stage, schedule, unsplit = start(devices, is_deferred=is_deferred)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    expected = torch.optim.SGD(unsplit.parameters(), lr=0.1)
    found: dict[str, Any] = {"errors": [], "compiled": []}
    for rows, length in [*shapes, *shapes[:2], *shapes]:
        x, y = torch.randint(VOCAB, (2, rows, length))
        before = debug.counter_value("UncachedCompile") or 0
        for training in (False, True):
            stage.submod.train(training)
            unsplit.train(training)
            with torch.no_grad():
                wanted = loss_fn(unsplit(x), y)
            run(schedule.eval, stage, x, y)
            error = xpp.losses(schedule).mean() - wanted
            found["errors"].append(abs(float(error)))
        run(schedule.step, stage, x, y)
        for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
            (loss_fn(unsplit(part_x), part_y) / MICROBATCHES).backward()
        named = dict(unsplit.named_parameters())
        for name, parameter in stage.submod.named_parameters():
            error = (parameter.grad.cpu() - named[name].grad).abs().max()
            found["errors"].append(float(error))
        optimizer.step()
        optimizer.zero_grad()
        expected.step()
        expected.zero_grad()
        found["compiled"].append((debug.counter_value("UncachedCompile") or 0) - before)
    found["state"] = list(stage.submod.state_dict())
    return found


def test_lengths_and_rows_may_change_from_step_to_step(worlds: Worlds) -> None:
    shapes = [(8, LONGEST), (8, 5), (4, 12)]
    for found in worlds.run(train, ranks=2, devices=2, args=(shapes, 2, True)):
        assert max(found["errors"]) < 2e-5
        compiled = found["compiled"]
        assert min(compiled[: len(shapes)]) > 0
        assert compiled[-len(shapes) :] == [0] * len(shapes)
        assert not [name for name in found["state"] if "shapes" in name]


def train_in_buckets() -> dict[str, Any]:
    """Train with batches of all lengths, filled up; compare with eager as they are."""
    stage, schedule, unsplit = start(1)
    buckets = xpp.LengthBuckets((4, 9, LONGEST))
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    expected = torch.optim.SGD(unsplit.parameters(), lr=0.1)
    found: dict[str, Any] = {"errors": [], "compiled": []}
    for length in (16, 9, 4, 3, 12, 1, 7, 15, 2):
        x, y = torch.randint(VOCAB, (2, 8, length))
        before = debug.counter_value("UncachedCompile") or 0
        run(schedule.step, stage, buckets.fill(x, 0), buckets.fill(y, -100))
        loss = loss_fn(unsplit(x), y)
        found["errors"].append(float(xpp.losses(schedule).mean() - loss.detach()))
        loss.backward()
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
        found["compiled"].append((debug.counter_value("UncachedCompile") or 0) - before)
    return found


def test_batches_of_all_lengths_need_no_more_programs_than_sizes(
    worlds: Worlds,
) -> None:
    for found in worlds.run(train_in_buckets, ranks=2):
        assert max(map(abs, found["errors"])) < 2e-5
        assert found["compiled"][5:] == [0] * 4


def step_with_a_baked_length() -> None:
    stage, schedule, _ = start(1, is_baked=True)
    x = torch.zeros(8, LONGEST, dtype=torch.long)
    run(schedule.step, stage, x, x)
    run(schedule.step, stage, x[:, :5], x[:, :5])


def test_a_model_that_has_its_length_built_in_is_refused_on_every_rank(
    worlds: Worlds,
) -> None:
    outcomes = worlds.run_outcomes(step_with_a_baked_length, ranks=2)
    for outcome in outcomes:
        assert outcome.error == "StageShapeError"
        assert f"as its example (int64[4, {LONGEST}]), got" in outcome.message
        assert "(int64[4, 5])" in outcome.message
        assert "test_other_shapes.py:" in outcome.message
        assert "xpp.LengthBuckets" in outcome.message


def step_with_what_cannot_be_copied() -> None:
    rank = join().rank()
    model = Model()
    model.lock = threading.Lock()
    example = torch.zeros(4, LONGEST, dtype=torch.long)
    spec = {"layers.1": SplitPoint.BEGINNING}
    stage = xpp.pipeline(model, (example,), split_spec=spec).build_stage(
        rank, xpp.device()
    )
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    x = torch.zeros(8, 5, dtype=torch.long)
    run(schedule.eval, stage, x, x)


def test_a_model_that_cannot_be_copied_takes_its_examples_shapes_alone(
    worlds: Worlds,
) -> None:
    outcomes = worlds.run_outcomes(step_with_what_cannot_be_copied, ranks=2)
    for outcome in outcomes:
        assert outcome.error == "StageShapeError"
        assert "the model cannot be copied: TypeError" in outcome.message
        assert "take out of it what cannot be copied" in outcome.message
