"""A short batch trains and evaluates as itself, whatever it was filled up to."""

import copy
from typing import Any

import pytest
import torch
import torch_xla.debug.metrics as debug
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

WIDTH, CLASSES, ROWS, MICROBATCHES = 6, 5, 8, 4
# The first short batch fills two microbatches, and one row of the third.
SAMPLES = 2 * ROWS + 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def mean(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    right = (output.argmax(-1) == target).sum()
    return F.cross_entropy(output, target), {"right": right}


def total(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def train(reduction: str, sizes: Any, devices: int) -> dict[str, Any]:
    """Run two epochs over a loader with a short last batch."""
    rank = join().rank()
    mesh = xpp.init_device_mesh("xla", (2, devices), mesh_dim_names=("pp", "data"))
    torch.manual_seed(0)
    model = Model()
    unsplit = copy.deepcopy(model)
    pipe = xpp.pipeline(
        model,
        mb_args=(torch.zeros(ROWS // MICROBATCHES, WIDTH),),
        split_spec={"second": SplitPoint.BEGINNING},
    )
    stage = pipe.build_stage(rank, xpp.device(), mesh=mesh["data"])
    loss_fn: Any = mean if reduction == "mean" else total
    schedule = Schedule1F1B(
        stage, MICROBATCHES, loss_fn=loss_fn, scale_grads=reduction == "mean"
    )
    x = torch.randn(SAMPLES, WIDTH)
    loader = DataLoader(TensorDataset(x, x.argmax(1) % CLASSES), batch_size=ROWS)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    expected = torch.optim.SGD(unsplit.parameters(), lr=0.1)
    found: dict[str, Any] = {"errors": [], "rows": []}
    for epoch in range(2):
        for x, y in loader:
            result = loss_fn(unsplit(x), y)
            loss, wanted = result if reduction == "mean" else (result, None)
            loss.backward()
            expected.step()
            expected.zero_grad()
            count = len(x)
            x, y = xpp.pad_batch(schedule, x, y, rows=sizes, reduction=reduction)
            before = debug.counter_value("UncachedCompile") or 0
            if epoch == 0:
                run(schedule.eval, stage, x, y)
                losses = xpp.losses(schedule)
                # Only the next step is of a padded batch: say it again.
                if count < ROWS:
                    pad = x[:count], y[:count]
                    xpp.pad_batch(schedule, *pad, rows=sizes, reduction=reduction)
                found["errors"].append(float(sum_of(losses, reduction) - loss))
            run(schedule.step, stage, x, y)
            found["compiled"] = (debug.counter_value("UncachedCompile") or 0) - before
            losses = xpp.losses(schedule)
            found["errors"].append(float(sum_of(losses, reduction) - loss.detach()))
            found["rows"].append((count, len(x)))
            if wanted is not None:
                assert torch.equal(xpp.metrics(schedule)["right"], wanted["right"])
            optimizer.step()
            optimizer.zero_grad()
    named = dict(unsplit.named_parameters())
    found["errors"] += [
        float((p.detach().cpu() - named[name].detach()).abs().max())
        for name, p in stage.submod.named_parameters()
    ]
    return found


def sum_of(losses: Tensor, reduction: str) -> Tensor:
    return losses.mean() if reduction == "mean" else losses.sum()


def run(call: Any, stage: Any, x: Tensor, y: Tensor) -> None:
    if stage.is_first:
        call(x)
    else:
        call(target=y.to(xpp.device()))


@pytest.mark.parametrize(("reduction", "devices"), [("mean", 1), ("sum", 2)])
def test_a_short_last_batch_trains_as_in_eager(
    worlds: Worlds, reduction: str, devices: int
) -> None:
    args = (reduction, ROWS, devices)
    for found in worlds.run(train, ranks=2, devices=devices, args=args):
        assert max(map(abs, found["errors"])) < 3e-5
        assert found["rows"] == [(8, 8), (8, 8), (5, 8)] * 2
        assert found["compiled"] == 0


def ignore(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def ignore_in_sum(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def train_on_tokens(loss_fn: Any, reduction: Any) -> list[float]:
    """Train on a short batch of tokens of which each row ignores another number."""
    rank = join().rank()
    torch.manual_seed(0)
    model = Model()
    unsplit = copy.deepcopy(model)
    part = [model.first, model.second][rank]
    stage = xpp.PipelineStage(part, rank, 2, xpp.device())
    is_mean = reduction == "mean"
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn, scale_grads=is_mean)
    x = torch.randn(5, 4, WIDTH)
    y = torch.randint(CLASSES, (5, 4))
    y[torch.arange(4) < torch.arange(5)[:, None] % 4] = -100
    loss = loss_fn(unsplit.second(unsplit.first(x)), y)
    loss.backward()
    x, y = xpp.pad_batch(schedule, x, y, rows=ROWS, reduction=reduction)
    run(schedule.step, stage, x, y)
    error = float(sum_of(xpp.losses(schedule), reduction) - loss.detach())
    wanted = [unsplit.first, unsplit.second][rank]
    pairs = zip(stage.submod.parameters(), wanted.parameters(), strict=True)
    return [error, *(float((p.grad.cpu() - q.grad).abs().max()) for p, q in pairs)]  # type: ignore[union-attr,operator]


def test_a_sum_that_ignores_tokens_is_that_of_the_short_batch(worlds: Worlds) -> None:
    for errors in worlds.run(train_on_tokens, ranks=2, args=(ignore_in_sum, "sum")):
        assert max(map(abs, errors)) < 3e-5


@pytest.mark.parametrize(
    ("loss_fn", "reduction"), [(ignore, "mean"), (ignore_in_sum, "mean")]
)
def test_a_loss_that_is_no_mean_over_rows_is_refused(
    worlds: Worlds, loss_fn: Any, reduction: str
) -> None:
    outcomes = worlds.run_outcomes(
        train_on_tokens, ranks=2, args=(loss_fn, reduction), keep_workers=True
    )
    for outcome in outcomes:
        assert outcome.error == "PipelineError"
        assert "expected a loss_fn that is a mean over rows, got" in outcome.message


def pad_wrongly(case: str) -> None:
    rank = join().rank()
    stage = xpp.PipelineStage(nn.Linear(2, 2), rank, 2, xpp.device())
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)
    x = torch.zeros(3, 2)
    assert xpp.pad_batch(schedule, x, rows=(16, 4, 8)).shape == (4, 2)
    assert xpp.pad_batch(schedule, x, rows=3) is x
    (a, b), c = xpp.pad_batch(schedule, [x, x], x, rows=5)
    assert {len(a), len(b), len(c)} == {5}
    bad = {"long": (x,), "none": (x[:0],), "unlike": (x, x[:2]), "nothing": ()}
    xpp.pad_batch(schedule, *bad[case], rows=2)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("long", "expected at most 2 rows, got 3"),
        ("none", "same number of rows, at least one"),
        ("unlike", r"got [2, 3]"),
        ("nothing", "got none"),
    ],
)
def test_what_cannot_be_filled_up_is_refused(
    worlds: Worlds, case: str, text: str
) -> None:
    for outcome in worlds.run_outcomes(
        pad_wrongly, ranks=2, args=(case,), keep_workers=True
    ):
        assert outcome.error == "ValueError"
        assert text in outcome.message
