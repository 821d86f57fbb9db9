"""Messages between ranks are part of the stages' programs, also when they fail."""

import pytest
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.debug.metrics as metrics
from integration.training import Job, batch, run_step, start
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

import torch_xla_pp as xpp
from torch_xla_pp import xla_compat
from torch_xla_pp.testing import Worlds
from torch_xla_pp.transport import of_group

pytestmark = pytest.mark.worlds


def num_runs() -> int:
    xla_compat.wait_device()
    data = metrics.metric_data("ExecuteReplicatedTime")
    return int(data[0]) if data else 0


def programs_per_step() -> int:
    """Count the programs that a step of the first stage runs."""
    job = Job(schedule="GPipe", frontend="manual", num_microbatches=4)
    stages, schedule = start(job)
    x, y = (value.to("xla") for value in batch(job, 0))
    torch_xla.sync()
    counts = []
    for _ in range(3):
        before = num_runs()
        run_step(job, schedule, stages, x, y)
        counts.append(num_runs() - before)
    assert counts[1] == counts[2]
    return counts[2]


def test_an_action_of_a_middle_rank_is_one_program(worlds: Worlds) -> None:
    first, _ = worlds.run(programs_per_step, ranks=2, devices=1, keep_workers=True)
    # A forward, a backward, and the cut of the batch, for each of four microbatches;
    # and once the beginning of the gradients' sums and the taking apart of small ones.
    assert first == 3 * 4 + 2


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.to(output.device)).square().mean()


def failed_step(transport: str) -> None:
    device = xpp.device()
    rendezvous = join(transport).rendezvous
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = xpp.PipelineStage(Normed(), rank, 2, device)
    schedule = ScheduleGPipe(stage, 2, loss_fn=squared)
    x = torch.arange(32.0).reshape(8, 4)

    def step() -> None:
        schedule.step(x) if rank == 0 else schedule.step(target=x)

    def state() -> list[Tensor]:
        return [value.detach().cpu() for value in stage.submod.state_dict().values()]

    step()
    before = state()
    grads = [p.grad.cpu() for p in stage.submod.parameters()]  # type: ignore[union-attr]
    dist.barrier()  # The other rank may still be in its first step.
    if rank == 0:
        rendezvous.report(ValueError("no batch"))
    else:
        with pytest.raises(ValueError, match=r"no batch \(raised on rank 0\)"):
            step()
    for got, want in zip(state(), before, strict=True):
        assert torch.equal(got, want)
    for parameter, want in zip(stage.submod.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad.cpu(), want)  # type: ignore[union-attr]
    # The next step is as if nothing had happened.
    stage.submod.zero_grad()
    step()
    assert all(value.isfinite().all() for value in state())
    assert all(p.grad.cpu().isfinite().all() for p in stage.submod.parameters())


@pytest.mark.parametrize("transport", ["in_graph", "host"])
def test_a_failed_step_leaves_no_trace(worlds: Worlds, transport: str) -> None:
    worlds.run(failed_step, ranks=2, devices=1, args=(transport,), keep_workers=True)


def failure_between_steps() -> None:
    """A peer's error is noticed after a step has begun, before it has done anything."""
    rendezvous = join().rendezvous
    rank = dist.get_rank()
    stage = xpp.PipelineStage(Normed(), rank, 2, xpp.device())
    schedule = ScheduleGPipe(stage, 2, loss_fn=squared)
    x = torch.arange(32.0).reshape(8, 4)

    def step() -> None:
        schedule.step(x) if rank == 0 else schedule.step(target=x)

    step()
    before = [value.detach().cpu() for value in stage.submod.buffers()]
    if rank == 0:
        dist.barrier()
        rendezvous.report(ValueError("no batch"))
    else:
        transport = of_group(None).transport
        settle = transport.settle

        def late() -> None:
            dist.barrier()
            rendezvous.wait_until(lambda _: not rendezvous.calm(), 30, lambda: "it")
            settle()

        transport.settle = late  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="no batch"):
            step()
    for got, want in zip(stage.submod.buffers(), before, strict=True):
        assert torch.equal(got.cpu(), want)


def test_a_failure_between_steps_undoes_nothing(worlds: Worlds) -> None:
    worlds.run(failure_between_steps, ranks=2, devices=1, keep_workers=True)
