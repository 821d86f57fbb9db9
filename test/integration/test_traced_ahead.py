"""Ranks trace their stages at the same time, not one after the other."""

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.compile import stage_tracer
from torch_xla_pp.graph import replaced
from torch_xla_pp.runtime.agreement import Agreement
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

WIDTH, ROWS, MICROBATCHES = 4, 4, 2
LIMIT_S = 60.0


class Model(nn.Module):
    """Its second stage takes a value that needs no gradient if the first is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def trained(path: str, is_frozen: bool, is_traced: bool) -> dict[str, Any]:
    """Do a step; the first stage keeps its offer until the second one is traced."""
    rank, mark = join().rank(), Path(path)
    torch.manual_seed(0)
    model = Model()
    model.first.requires_grad_(not is_frozen)
    whole = copy.deepcopy(model)
    x, y = torch.randn(2, ROWS, WIDTH)
    seen = []
    offer, export = Agreement.offer, stage_tracer.export_joint

    def offer_late(self: Any, *args: Any) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not mark.exists() and time.monotonic() < end_s:
            time.sleep(0.01)
        seen.append(mark.exists())
        offer(self, *args)

    def export_marked(*args: Any, **kwargs: Any) -> Any:
        joint = export(*args, **kwargs)
        if rank:
            mark.touch()
        return joint

    example = torch.zeros(ROWS // MICROBATCHES, WIDTH)
    if is_traced:
        spec = {"second": SplitPoint.BEGINNING}
        pipe = xpp.pipeline(model, mb_args=(example,), split_spec=spec)
        stage = pipe.build_stage(rank, xpp.device())
    else:
        part = model.second if rank else nn.Sequential(model.first, nn.ReLU())
        stage = xpp.PipelineStage(part, rank, 2, xpp.device(), input_args=(example,))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=F.mse_loss)
    with (
        replaced(Agreement, "offer", offer_late),
        replaced(stage_tracer, "export_joint", export_marked),
        xpp.note_phases() as phases,
    ):
        if rank:
            schedule.step(target=y, losses=[])
        else:
            schedule.step(x)
    for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        (F.mse_loss(whole(part), target) / MICROBATCHES).backward()
    own = whole.second if rank else whole.first
    pairs = zip(stage.submod.parameters(), own.parameters(), strict=True)
    errors = [
        0.0 if a.grad is b.grad else float((a.grad.cpu() - b.grad).abs().max())
        for a, b in pairs
    ]
    return {
        "seen": seen,
        "joint graphs": phases.costs["joint graph"].num_blocks,
        "errors": errors,
    }


@pytest.mark.parametrize("is_traced", [True, False])
def test_a_stage_is_traced_before_it_is_told_what_it_takes(
    worlds: Worlds, tmp_path: Path, is_traced: bool
) -> None:
    path = str(tmp_path / "second stage")
    first, last = worlds.run(trained, ranks=2, args=(path, False, is_traced))
    assert first["seen"] == [True]
    # The last stage's, and the loss's.
    assert (first["joint graphs"], last["joint graphs"]) == (1, 2)
    assert max(first["errors"] + last["errors"]) < 1e-5


def test_a_stage_is_traced_again_if_it_takes_something_else(
    worlds: Worlds, tmp_path: Path
) -> None:
    path = str(tmp_path / "second stage")
    first, last = worlds.run(trained, ranks=2, args=(path, True, True))
    assert first["seen"] == [True]
    assert (first["joint graphs"], last["joint graphs"]) == (1, 3)
    assert max(last["errors"]) < 1e-5
