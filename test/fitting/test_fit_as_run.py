"""What is added up without a run is what a run holds."""

import pytest
import torch
import torch.distributed as dist
from fitting.small_model import ROWS, Model, Recorder, fit_model
from joining import join
from torch.distributed.pipelining import ScheduleGPipe
from torch.nn.functional import mse_loss

import torch_xla_pp as xpp
from torch_xla_pp.schedule import gpipe
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

WIDTH, MICROBATCHES = 64, 3


def held_and_fitted() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return saved and constant bytes of this rank's stage, as run and as added up."""
    join()
    x = torch.randn(MICROBATCHES * ROWS, WIDTH)
    pipe = xpp.pipeline(Model(WIDTH), (x[:ROWS],))
    rank = dist.get_rank()
    stage = pipe.build_stage(rank, xpp.device())
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=mse_loss)
    # Outputs are taken, so that the last stage keeps values until its backward, too.
    args = [x] if rank == 0 else []
    _ = schedule.step(*args, target=x if rank else None)
    found = stage.peak_memory()
    fit = fit_model(
        Recorder(),
        WIDTH,
        topology="v5e:1x1",
        schedule=gpipe(2, MICROBATCHES),
    ).stages[rank]
    # Sums of small gradients are one value on a CPU device: in the end they are copied.
    copied = fit.gradient_bytes
    fixed = fit.parameter_bytes + fit.buffer_bytes + fit.gradient_bytes + copied
    return (found.saved_bytes, found.state_bytes), (
        fit.saved_bytes * MICROBATCHES,
        fixed,
    )


def test_saved_values_and_state_are_those_of_a_run(worlds: Worlds) -> None:
    first, last = worlds.run(held_and_fitted, ranks=2, devices=1)
    assert first[0] == first[1]
    (saved, state), (fitted, fixed) = last
    assert state == fixed
    # The last stage also keeps outputs, and waits with the losses' gradients of them.
    assert saved == fitted + 2 * MICROBATCHES * ROWS * WIDTH * 4
