"""While models are traced the collector leaves alone what was there before."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from joining import join
from torch import Tensor, fx, nn
from torch.distributed.pipelining import ScheduleGPipe

import torch_xla_pp as xpp
from torch_xla_pp.collector import sparing_old_objects
from torch_xla_pp.testing import Worlds


class Loop:
    """An object that is freed by the collector alone."""

    def __init__(self) -> None:
        self.own = self


def made_loop() -> "weakref.ref[Loop]":
    return weakref.ref(Loop())


@pytest.mark.pure
def test_cycles_of_the_block_are_freed_in_it_and_older_ones_after_it() -> None:
    gc.collect()
    old = made_loop()
    with sparing_old_objects():
        new = made_loop()
        gc.collect()
        assert new() is None
        assert old() is not None
        with sparing_old_objects():
            inner = made_loop()
        assert gc.get_freeze_count()
    gc.collect()
    assert old() is None
    assert inner() is None
    assert not gc.get_freeze_count()


@pytest.mark.pure
def test_nothing_stays_frozen_after_an_error() -> None:
    with pytest.raises(KeyError), sparing_old_objects():
        raise KeyError
    assert not gc.get_freeze_count()


@pytest.mark.pure
def test_what_a_program_has_frozen_itself_stays_so() -> None:
    gc.freeze()
    try:
        with sparing_old_objects():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


class Counting(nn.Module):
    """A stage that notes how many objects are frozen where it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        counts.append(gc.get_freeze_count())
        return self.linear(x)


counts: list[int] = []


def counts_of_traces() -> list[int]:
    """Return how many objects are frozen in a split, in a first step and after each."""
    join()
    found = []

    def policy(traced: fx.GraphModule) -> fx.GraphModule:
        found.append(gc.get_freeze_count())
        return traced

    xpp.pipeline(nn.Linear(4, 4), (torch.randn(2, 4),), split_policy=policy)
    found.append(gc.get_freeze_count())
    stage = xpp.PipelineStage(Counting(), 0, 1, xpp.device())
    loss: Any = nn.functional.mse_loss
    schedule = ScheduleGPipe(stage, 2, loss_fn=loss)
    schedule.step(torch.randn(4, 4), target=torch.randn(4, 4), losses=[])
    found += [max(counts), gc.get_freeze_count()]
    dist.destroy_process_group()
    return found


@pytest.mark.worlds
def test_models_are_traced_so(worlds: Worlds) -> None:
    ((split, after_split, step, after_step),) = worlds.run(counts_of_traces, ranks=1)
    assert split > 0
    assert step > 0
    assert after_split == after_step == 0
