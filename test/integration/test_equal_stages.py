"""Equal stages of a rank are compiled once, however many they are."""

import pytest
import torch
from joining import join
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp import xla_compat
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

RANKS, MICROBATCHES = 2, 2


def num_compiled(stages: int, width: int) -> tuple[int, int]:
    """Do a step of equal stages; return how many programs were compiled and asked."""
    rank = join().rank()
    count = RANKS * stages
    made = [
        xpp.PipelineStage(nn.Linear(width, width), index, count, xpp.device())
        for index in range(rank, count, RANKS)
    ]
    schedule = ScheduleInterleaved1F1B(made, MICROBATCHES, loss_fn=F.mse_loss)
    x, y = torch.randn(2, 2 * MICROBATCHES, width)
    before = xla_compat.num_compilations()
    with xpp.note_phases() as phases:
        if rank:
            schedule.step(target=y, losses=[])
        else:
            schedule.step(x)
    asked = phases.costs["XLA"].num_blocks
    return xla_compat.num_compilations() - before, asked


def test_more_equal_stages_compile_no_more_programs(worlds: Worlds) -> None:
    # Other shapes, so that processes which are used again have no programs of theirs.
    few = worlds.run(num_compiled, ranks=RANKS, args=(2, 23))
    many = worlds.run(num_compiled, ranks=RANKS, args=(4, 29))
    for (compiled, asked), (still, more) in zip(few, many, strict=True):
        assert 0 < compiled == still
        assert more > asked
