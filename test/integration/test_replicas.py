"""Replicas of a pipeline train as one on the whole batch."""

import copy
import os
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from integration.test_parity import check
from integration.training import (
    Job,
    Model,
    Report,
    batch,
    build,
    loss_fn,
    mesh_of,
    run_step,
    train_joined,
)
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.runtime.gradients.replicas import agree_on_replicas
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds


def train_all(jobs: list[Job]) -> list[Report]:
    """Train one job after the other; groups choose their transport when first used."""
    join()
    found = []
    for job in jobs:
        env = {"TORCH_XLA_PP_TRANSPORT": job.transport or "in_graph"}
        with mock.patch.dict(os.environ, env):
            found.append(train_joined(job))
    return found


def check_replicas(by_rank: list[list[Report]]) -> None:
    """Check against the unsplit model, and that replicas are equal to the bit."""
    for reports in zip(*by_rank, strict=True):
        check(list(reports))
        seen: dict[str, Tensor] = {}
        for report in reports:
            for name, value in report.values.items():
                assert torch.equal(value, seen.setdefault(name, value)), name
            assert report.errors.get("norm", 0.0) < 1e-5


BASE = Job(
    frontend="manual", replicas=2, num_steps=2, evaluates=False, num_microbatches=2
)


def test_two_replicas_of_two_ranks_train_as_one_process(worlds: Worlds) -> None:
    tied = replace(BASE, is_tied=True, max_norm=0.3)
    jobs = [tied, replace(tied, schedule="InterleavedZeroBubble", max_norm=None)]
    check_replicas(worlds.run(train_all, ranks=4, args=(jobs,)))


def test_replicas_of_sharded_stages_train_as_one_process(worlds: Worlds) -> None:
    """Some gradients are whole on every device, others on two of four."""
    rules = {"*.up.weight": ("model", None), "*.down.weight": (None, "model")}
    job = replace(
        BASE,
        ranks=1,
        devices=4,
        axes=("data", "model"),
        axis_sizes=(2, 2),
        sharding=rules,
    )
    jobs = [job, replace(job, transport="host", dtype=torch.bfloat16)]
    by_rank = worlds.run(train_all, ranks=2, devices=4, args=(jobs,))
    for reports in by_rank:
        # As in test_parity: signs of gradients that are all rounding may differ.
        del reports[1].errors["parameters"]
        narrow = reports.pop()
        assert max(narrow.errors.values()) < 4e-2
        assert narrow.missing == []
    check_replicas(by_rank)


class Partly(nn.Module):
    """A stage with statistics, a frozen parameter and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.unused = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def stage_of(module: nn.Module, mesh: Any) -> Any:
    """Make the only stage of a pipeline of which every rank has a replica."""
    group, others = mesh.get_group("pp"), mesh.get_group("dp")
    return xpp.PipelineStage(
        module, 0, 1, xpp.device(), group=group, replicas=others, mesh=mesh["data"]
    )


def keep_apart() -> None:
    """Gradients of two steps add up; buffers and what gets no gradient stay alone."""
    join()
    mesh = mesh_of(replace(BASE, ranks=1))
    torch.manual_seed(0)
    references = [Partly()]
    stage = stage_of(copy.deepcopy(references[0]), mesh)
    references.append(copy.deepcopy(references[0]))
    schedule = ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)
    for _ in range(2):
        parts = torch.randn(2, 8, 4).unbind()
        for x, reference in zip(parts, references, strict=True):
            for part in x.chunk(2):
                (F.mse_loss(reference(part), part) / 4).backward()
        own = parts[mesh.get_local_rank("dp")]
        schedule.step(own, target=own)
    one, two = (dict(reference.named_parameters()) for reference in references)
    for name, parameter in stage.submod.named_parameters():
        if one[name].grad is None:
            assert parameter.grad is None
        else:
            mean = one[name].grad + two[name].grad
            assert torch.allclose(parameter.grad.cpu(), mean, rtol=1e-4, atol=1e-6)
    statistics = references[mesh.get_local_rank("dp")].norm.running_mean
    found = stage.submod.norm.running_mean.cpu()
    assert torch.allclose(found, statistics, rtol=1e-4, atol=1e-6)


class Dropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


def drop_as_one() -> None:
    """Masks are those of one pipeline that gets the parts one after the other."""
    join()
    mesh = mesh_of(replace(BASE, ranks=1))
    torch.manual_seed(0)
    x = torch.ones(16, 32)
    own, other = x.chunk(2)
    dropped = ScheduleGPipe(stage_of(Dropping(), mesh), 2).step(own).cpu()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    stage = xpp.PipelineStage(Dropping(), 0, 1, xpp.device(), group=alone)
    whole = ScheduleGPipe(stage, 4).step(x).cpu()
    parts = whole.chunk(2)
    assert torch.equal(dropped, parts[mesh.get_local_rank("dp")])
    assert not torch.equal(*parts)


def unequal_replicas() -> None:
    join()
    mesh = mesh_of(replace(BASE, ranks=1))
    torch.manual_seed(dist.get_rank())
    schedule = ScheduleGPipe(stage_of(Model(1), mesh), 2, loss_fn=loss_fn)
    x = torch.zeros(4, 3, dtype=torch.long)
    with pytest.raises(xpp.PlanError, match="do not hold equal stages") as caught:
        schedule.step(x, target=x)
    text = str(caught.value)
    assert "stage 0: parameter 'embed.weight': expected the same in every" in text
    assert " in replica 1.\n" in text
    assert "more parameters differ. Seed all replicas alike, or load" in text
    with pytest.raises(ValueError, match=r"replicas: .* same replicas to stages 0, 1"):
        agree_on_replicas({0: schedule._stage.model.replicas, 1: None}, 2)


def ranks_of_the_pipeline() -> None:
    join()
    mesh = mesh_of(replace(BASE, replicas=1))
    rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    with pytest.raises(ValueError, match=r"replicas: .* ranks \[0, 1\], of which \[0,"):
        xpp.PipelineStage(
            nn.Identity(), rank, 2, xpp.device(), group=group, replicas=group
        )


@pytest.mark.parametrize(
    "job", [keep_apart, drop_as_one, unequal_replicas, ranks_of_the_pipeline]
)
def test_replicas(worlds: Worlds, job: Any) -> None:
    worlds.run(job, ranks=2)


def fail_and_go_on() -> str:
    """Take a step for which one rank gets a wrong batch, then a right one."""
    join()
    mesh = mesh_of(BASE)
    torch.manual_seed(0)
    stages = build(BASE, Model(BASE.num_stages), mesh)
    count = BASE.num_microbatches
    schedule = Schedule1F1B(stages[0], count, loss_fn=loss_fn)
    x, y = (value[: BASE.rows] for value in batch(BASE, 0))
    is_victim = dist.get_rank() == 2
    with pytest.raises(xpp.StageShapeError) as caught:
        run_step(BASE, schedule, stages, x[:7] if is_victim else x, y)
    # torch's schedule keeps the losses of the step that failed.
    schedule = Schedule1F1B(stages[0], count, loss_fn=loss_fn)
    run_step(BASE, schedule, stages, x, y)
    grads = [parameter.grad for parameter in stages[0].submod.parameters()]
    assert all(bool(grad.isfinite().all()) for grad in grads)
    return str(caught.value)


def test_an_error_reaches_all_ranks_of_all_replicas(worlds: Worlds) -> None:
    texts = worlds.run(fail_and_go_on, ranks=4)
    passed_on = {text for rank, text in enumerate(texts) if rank != 2}
    assert passed_on == {f"{texts[2]} (raised on rank 2): stage 0, step 1"}
