"""A forward on a rank in the middle runs through few files of the package."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from joining import join
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds

MOST_FILES = 12
PACKAGE = Path(xpp.__file__).parent


def files_of_a_forward() -> list[str]:
    """Return the files that the second step's first forward enters."""
    join()
    rank = dist.get_rank()
    stage = xpp.PipelineStage(
        nn.Linear(4, 4), rank, dist.get_world_size(), xpp.device()
    )
    schedule = ScheduleGPipe(stage, 3, loss_fn=nn.functional.mse_loss)
    x = torch.zeros(6, 4)
    args: tuple[Any, ...] = (x,) if rank == 0 else ()
    kwargs = {"target": x} if stage.is_last else {}
    schedule.step(*args, **kwargs)
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.add(str(path.relative_to(PACKAGE)))

    forward = type(stage).forward_one_chunk

    def watched(index: int, *args: Any) -> Any:
        # The first of a step also finds out of which kind the step is.
        if index != 1:
            return forward(stage, index, *args)
        sys.setprofile(note)
        try:
            return forward(stage, index, *args)
        finally:
            sys.setprofile(None)

    stage.forward_one_chunk = watched
    schedule.step(*args, **kwargs)
    return sorted(entered)


def test_a_forward_in_the_middle_enters_few_files(worlds: Worlds) -> None:
    _, middle, _ = worlds.run(files_of_a_forward, ranks=3, devices=1)
    assert "runtime/stage.py" in middle
    assert len(middle) <= MOST_FILES, "\n".join(middle)
