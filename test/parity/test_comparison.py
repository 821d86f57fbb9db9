"""A pipeline is compared with the unsplit model, and what is wrong has its name."""

import copy
from typing import Any

import pytest
import torch
from integration.training import (
    Job,
    Model,
    Part,
    build,
    deferred,
    loss_fn,
    make_schedule,
    mesh_of,
    run_step,
)
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.parity import Verification
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

ROWS, LENGTH, VOCAB = 8, 3, 13


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(0, VOCAB, (2, ROWS, LENGTH), generator=generator)
    return x, y


class Half(nn.Module):
    """Some layers of `Noisy`, by their names there."""

    def __init__(self, model: "Noisy", rank: int) -> None:
        super().__init__()
        own = range(2) if rank == 0 else range(2, 4)
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in own})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Noisy(nn.Module):
    """A model with running means and, if wanted, dropout."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Dropout(p)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def check_traced() -> dict[str, Verification]:
    """Verify a traced model in the ways in which it may be wrong."""
    rank = join().rank()
    found = {}
    torch.manual_seed(0)
    model = Model(2)
    unsplit = copy.deepcopy(model)
    example = torch.zeros(ROWS // 4, LENGTH, dtype=torch.long)
    spec = {"blocks.1": SplitPoint.BEGINNING}
    pipe = xpp.pipeline(model, mb_args=(example,), split_spec=spec)
    stage = pipe.build_stage(rank, xpp.device())
    schedule = Schedule1F1B(stage, 4, loss_fn=loss_fn)
    x, y = batch()
    for parameter in stage.submod.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    found["cut from the model"] = xpp.verify(model, schedule, x, y)
    for parameter in stage.submod.parameters():
        assert parameter.grad is not None
        assert bool((parameter.grad == 7.0).all())
    assert stage.num_steps == 0
    found["beside a copy"] = xpp.verify(unsplit, schedule, (x,), y)
    some = xpp.verify(unsplit, schedule, x, y, parameters=["*.up.*", "head.bias"])
    found["some parameters"] = some
    unscaled = ScheduleGPipe(stage, 4, loss_fn=loss_fn, scale_grads=False)
    found["unscaled"] = xpp.verify(model, unscaled, x, y)
    with torch.no_grad():
        for name, parameter in stage.submod.named_parameters():
            if name == "blocks.0.up.weight":
                parameter.mul_(1.5)
    found["changed, beside a copy"] = xpp.verify(unsplit, schedule, x, y)
    found["changed in the model"] = xpp.verify(model, schedule, x, y)
    forward = Schedule1F1B(stage, 4)
    found["forward alone"] = xpp.verify(model, forward, x)
    return found


def names(report: Verification, what: str) -> set[str]:
    return {d.name for d in report.wrong if d.what == what}


def test_a_traced_model_is_verified_and_faults_are_named(worlds: Worlds) -> None:
    found, other = worlds.run(check_traced, ranks=2)
    assert {k: str(v) for k, v in found.items()} == {
        k: str(v) for k, v in other.items()
    }
    right = ("cut from the model", "beside a copy", "some parameters", "forward alone")
    for way in (*right, "changed in the model"):
        assert found[way].is_equal, f"{way}: {found[way]}"
    kinds = [d.what for d in found["cut from the model"].differences]
    num_parameters = len([*Model(2).parameters()])
    assert kinds == ["output", "loss"] + ["gradient"] * num_parameters
    kinds = [d.what for d in found["beside a copy"].differences]
    assert kinds.count("parameter") == num_parameters
    gradients = {
        d.name for d in found["some parameters"].differences if d.what == "gradient"
    }
    assert gradients == {
        *(f"blocks.{i}.up.{name}" for i in (0, 1) for name in ("weight", "bias")),
        "head.bias",
    }
    assert {d.what for d in found["forward alone"].differences} == {"output"}
    unscaled = found["unscaled"]
    assert len(names(unscaled, "gradient")) == num_parameters
    assert all(abs(d.ratio - 4) < 1e-3 for d in unscaled.wrong)
    assert "run microbatch by microbatch" in str(unscaled)
    changed = found["changed, beside a copy"]
    assert names(changed, "parameter") == {"blocks.0.up.weight"}
    assert {"output"} == names(changed, "output")
    assert "blocks.0.up.weight" in str(changed)
    assert changed.notes == ()


def check_manual() -> dict[str, Verification]:
    """Verify stages made by hand, of which one computes something else."""
    rank = join().rank()
    found = {}
    torch.manual_seed(0)
    model = Model(2)
    x, y = batch()
    stage = xpp.PipelineStage(
        Part(copy.deepcopy(model), rank), rank, 2, xpp.device(), tied={}
    )
    found["stages"] = xpp.verify(model, stage, x, y, loss_fn=loss_fn)
    found["no loss"] = xpp.verify(model, [stage], x)

    class Wrong(Part):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            # A gradient that does not come back.
            return x if self.training and hasattr(self, "head") else x.detach() + 0 * x

    part = Wrong(copy.deepcopy(model), rank)
    stage = xpp.PipelineStage(part, rank, 2, xpp.device())
    schedule = Schedule1F1B(stage, 4, loss_fn=loss_fn)
    found["wrong"] = xpp.verify(model, schedule, x, y)
    for p in (0.0, 0.5):
        noisy = Noisy(p)
        half = Half(noisy, rank)
        stage = xpp.PipelineStage(half, rank, 2, xpp.device())
        schedule = Schedule1F1B(stage, 2, loss_fn=F.mse_loss)
        z = torch.randn(2 * ROWS, 4, generator=torch.Generator().manual_seed(1))
        found[f"dropout {p}"] = xpp.verify(noisy, schedule, z, z)
        if rank == 0:
            mean: Any = half.layers["1"].running_mean
            assert not bool(mean.cpu().any())
    return found


def test_stages_by_hand_are_verified_and_faults_are_named(worlds: Worlds) -> None:
    found, _ = worlds.run(check_manual, ranks=2)
    assert found["stages"].is_equal, str(found["stages"])
    assert found["no loss"].is_equal, str(found["no loss"])
    wrong = found["wrong"]
    assert names(wrong, "output") == names(wrong, "loss") == set()
    of_first = {name for name, _ in Part(Model(2), 0).named_parameters()}
    assert names(wrong, "gradient") == of_first
    assert {d.ratio for d in wrong.wrong} == {0.0}
    # Statistics of a microbatch are not those of the batch.
    assert "layers.1.running_mean" in names(found["dropout 0.0"], "buffer")
    assert "BatchNorm" in found["dropout 0.0"].notes[0]
    assert "draws random numbers" in found["dropout 0.5"].notes[0]


def check_job(job: Job) -> list[Verification]:
    """Verify before and after a step of training."""
    join()
    mesh = mesh_of(job)
    torch.manual_seed(0)
    model = deferred(job) if job.init_device == "deferred" else Model(4, is_tied=True)
    stages = build(job, model, mesh)
    schedule = make_schedule(job, stages)
    x, y = batch()
    found = [xpp.verify(model, schedule, x, y)]
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    run_step(job, schedule, stages, x, y)
    optimizer.step()
    optimizer.zero_grad()
    return [*found, xpp.verify(model, schedule, x, y)]


@pytest.mark.parametrize(
    "job",
    [
        Job(schedule="DualPipeV", frontend="manual", devices=2, is_tied=True),
        Job(schedule="Interleaved1F1B", init_device="deferred", devices=2),
    ],
)
def test_tied_and_deferred_models_are_verified_as_they_train(
    worlds: Worlds, job: Job
) -> None:
    for found in worlds.run(check_job, ranks=2, devices=2, args=(job,)):
        for report in found:
            assert report.is_equal, str(report)


def refuse(kind: str) -> None:
    rank = join().rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    own: Any = copy.deepcopy(model[rank]) if kind == "names" else model[rank]
    stage = xpp.PipelineStage(own, rank, 2, xpp.device())
    x = torch.full((4, 4), float(rank if kind == "batch" else 0))
    xpp.verify(model, stage, x, x, loss_fn=F.mse_loss)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "batch",
            "expected the same batch on every rank, got batches with the digests",
        ),
        ("names", "got weight of stage 0, bias of stage 0, weight of stage 1"),
    ],
)
def test_what_cannot_be_compared_is_refused_on_every_rank(
    worlds: Worlds, kind: str, text: str
) -> None:
    for outcome in worlds.run_outcomes(
        refuse, ranks=2, args=(kind,), keep_workers=True
    ):
        assert outcome.error == "ValueError"
        assert text in outcome.message


def verify_replicas() -> tuple[bool, str, list[str], list[float]]:
    """Verify two replicas on parts of a batch, as they are and with one scaled."""
    join()
    mesh = xpp.init_device_mesh("xla", (2, 2, 1), mesh_dim_names=("dp", "pp", "data"))
    replica, rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = xpp.pipeline(
        model, mb_args=(torch.zeros(2, 4),), split_spec={"2": SplitPoint.BEGINNING}
    )
    stage = pipe.build_stage(
        rank, xpp.device(), mesh.get_group("pp"), replicas=mesh.get_group("dp")
    )
    x, y = torch.randn(2, 8, 4).chunk(2, dim=1)[replica]
    reports = [
        xpp.verify(model, Schedule1F1B(stage, 2, loss_fn=loss), x, y)
        for loss in (F.mse_loss, lambda a, b: (1 + 2 * replica) * F.mse_loss(a, b))
    ]
    wrong = xpp.verify(
        model, Schedule1F1B(stage, 2, loss_fn=F.mse_loss, scale_grads=False), x, y
    )
    ratios = [d.ratio for d in wrong.wrong if d.what == "gradient"]
    return (
        reports[0].is_equal,
        str(reports[0]),
        [d.name for d in reports[1].wrong],
        ratios,
    )


def test_replicas_are_compared_with_the_mean_over_their_parts(worlds: Worlds) -> None:
    for found in worlds.run(verify_replicas, ranks=4):
        is_equal, text, wrong, ratios = found
        assert is_equal, text
        assert {"0.weight", "0.bias", "2.weight", "2.bias"} <= set(wrong)
        assert ratios == pytest.approx([2.0] * 4, abs=1e-3)
