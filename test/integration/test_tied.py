"""One parameter of several stages stays one parameter."""

import pytest
import torch
from integration.test_parity import check
from integration.training import Job, run_step, start, train

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds


@pytest.mark.parametrize(
    ("schedule", "transport", "devices"),
    [
        ("1F1B", "in_graph", 2),
        ("1F1B", "host", 1),
        ("Interleaved1F1B", "in_graph", 1),
        # Both copies are on one rank.
        ("ZBVZeroBubble", "in_graph", 2),
        ("DualPipeV", "in_graph", 1),
    ],
)
def test_tied_embeddings_train_as_one(
    worlds: Worlds, schedule: str, transport: str, devices: int
) -> None:
    job = Job(
        schedule=schedule,
        frontend="manual",
        transport=transport,
        devices=devices,
        is_tied=True,
        max_norm=0.3,
    )
    reports = worlds.run(train, ranks=2, devices=devices, args=(job,))
    check(reports)
    assert all(report.errors["norm"] < 1e-5 for report in reports)
    first, second = (copy for report in reports for copy in report.tied)
    assert torch.equal(first, second)


def unequal_copies() -> None:
    job = Job(frontend="manual", is_tied=True)
    stages, schedule = start(job)
    with torch.no_grad():
        for parameter in stages[0].submod.parameters():
            parameter.add_(stages[0].stage_index)
    x = torch.zeros(job.rows, job.length, dtype=torch.long)
    with pytest.raises(xpp.PlanError, match="'embedding': expected equal copies, got"):
        run_step(job, schedule, stages, x, x)


def unknown_names() -> None:
    stages, _ = start(Job(frontend="manual"))
    module = stages[0].submod
    with pytest.raises(ValueError, match=r"tied: expected names of .* got no.such\. "):
        xpp.PipelineStage(module, 0, 2, xpp.device(), tied={"no.such": "w"})


def accumulate_over_two_steps() -> None:
    """Gradients that were kept count once, whatever the number of copies."""
    job = Job(frontend="manual", is_tied=True)
    stages, schedule = start(job)
    x = torch.ones(job.rows, job.length, dtype=torch.long)
    run_step(job, schedule, stages, x, x)

    grads = [p.grad.cpu() for p in stages[0].submod.parameters()]
    run_step(job, schedule, stages, x, x)
    for parameter, grad in zip(stages[0].submod.parameters(), grads, strict=True):
        assert torch.allclose(parameter.grad.cpu(), 2 * grad, rtol=1e-5, atol=1e-6)
    count = len(list(stages[0].submod.parameters()))
    is_first = stages[0].is_first
    assert len(stages[0].owned_parameters()) == count - (not is_first)
    held = {"embed.weight", "head.weight"} & set(stages[0].state_dict())
    assert held == ({"embed.weight"} if is_first else set())


def frozen_in_one_stage() -> None:
    """Frozen in all stages it stays as it is, in one of them only it is refused."""
    job = Job(frontend="manual", is_tied=True)
    stages, schedule = start(job)
    x = torch.ones(job.rows, job.length, dtype=torch.long)
    (name,) = stages[0].model.tied
    copy = stages[0].submod.get_parameter(name).requires_grad_(False)
    run_step(job, schedule, stages, x, x)
    assert copy.grad is None
    copy.requires_grad_(stages[0].is_first)
    with pytest.raises(xpp.PipelineError, match=r"weight to be frozen in stage [01], "):
        run_step(job, schedule, stages, x, x)


@pytest.mark.parametrize(
    "job", [unequal_copies, accumulate_over_two_steps, frozen_in_one_stage]
)
def test_copies(worlds: Worlds, job: object) -> None:
    worlds.run(job, ranks=2, devices=1)  # type: ignore[arg-type]


def test_names_of_no_parameter_are_refused(worlds: Worlds) -> None:
    worlds.run(unknown_names, ranks=2, devices=1)
