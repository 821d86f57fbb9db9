"""What is noted of the way to the first step, and how often its parts are done."""

import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint

import torch_xla_pp as xpp
from torch_xla_pp.phases import REST, phase

pytestmark = pytest.mark.pure

CUT = {"second": SplitPoint.BEGINNING}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.changed(self.first(x)))

    def changed(self, x: Tensor) -> Tensor:
        return x.relu()


class Helper:
    """Is no module, and reads the mode of one."""

    def changed(self, module: nn.Module, x: Tensor) -> Tensor:
        return 2 * x if module.training else x


class Helped(Two):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper()

    def changed(self, x: Tensor) -> Tensor:
        return self.helper.changed(self, x)


class Switched(Two):
    """Has another word for its mode."""

    is_on = True

    def train(self, mode: bool = True) -> "Switched":
        self.is_on = mode
        return super().train(mode)

    def changed(self, x: Tensor) -> Tensor:
        return 2 * x if self.is_on else x


class Dropping(Two):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def changed(self, x: Tensor) -> Tensor:
        return self.drop(x)


def doubled(module: nn.Module, _args: Any, result: Tensor) -> Tensor:
    return 2 * result if module.training else result


def hooked() -> nn.Module:
    model = Two()
    model.first.register_forward_hook(doubled)
    return model


def traced(model: nn.Module) -> int:
    """Return how often a model is traced to be split."""
    with xpp.note_phases() as phases:
        xpp.pipeline(model, mb_args=(torch.ones(2, 4),), split_spec=CUT)
    assert phases.costs["split"].num_blocks == phases.costs["trace"].num_blocks
    return phases.costs["trace"].num_blocks


def test_a_model_that_does_not_read_its_mode_is_traced_once() -> None:
    assert traced(Two()) == 1


@pytest.mark.parametrize("make", [Helped, Switched, Dropping, hooked])
def test_a_model_that_reads_its_mode_is_traced_in_each(
    make: Callable[[], nn.Module],
) -> None:
    assert traced(make()) == 2


@pytest.mark.parametrize("make", [Helped, Switched, hooked])
def test_each_mode_has_its_own_results(make: Callable[[], nn.Module]) -> None:
    model, x = make(), torch.randn(2, 4)
    pipe = xpp.pipeline(model, mb_args=(x,), split_spec=CUT)
    for training in (True, False):
        model.train(training)
        for stage in range(2):
            pipe.get_stage_module(stage).train(training)
        torch.testing.assert_close(pipe(x)[0], model(x))


def test_a_model_is_traced_without_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"started {args}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert traced(Two()) == 1


def test_a_phase_inside_of_another_counts_alone() -> None:
    with xpp.note_phases() as phases:
        with phase("outer"):
            with phase("inner"):
                time.sleep(0.05)
            with phase("inner"):
                pass
        costs = phases.costs
    assert {name: cost.num_blocks for name, cost in costs.items()} == {
        REST: 1,
        "outer": 1,
        "inner": 2,
    }
    assert costs["inner"].wall_s >= 0.05 > costs["outer"].wall_s
    # Who sleeps takes no processor.
    assert costs["inner"].thread_s < 0.05


def test_a_phase_that_fails_has_ended() -> None:
    with xpp.note_phases() as phases:
        with pytest.raises(ValueError, match="in it"), phase("failing"):
            raise ValueError("in it")
        before = phases.costs["failing"].wall_s
        time.sleep(0.01)
        assert phases.costs["failing"].wall_s == before


def test_nothing_is_noted_outside_of_the_block() -> None:
    with xpp.note_phases() as phases:
        pass
    with phase("later"):
        pass
    assert "later" not in phases.costs
