"""Models that cannot be split say why."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint

import torch_xla_pp as xpp

pytestmark = pytest.mark.pure

CUT = {"second": SplitPoint.BEGINNING}


class Two(nn.Module):
    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        if is_tied:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def test_a_split_model_shows_its_stages() -> None:
    pipe = xpp.pipeline(Two(), mb_args=(torch.ones(2, 4),), split_spec=CUT)
    assert str(pipe.stage_graph) == "2 stages\n  0.out0 -> 1.in0"
    assert pipe.num_stages == 2


def test_an_unknown_submodule_in_split_spec() -> None:
    with pytest.raises(ValueError, match=r"got unknown \['third'\].*first, second"):
        xpp.pipeline(
            Two(),
            mb_args=(torch.ones(2, 4),),
            split_spec={"third": SplitPoint.BEGINNING},
        )


def test_a_parameter_of_two_stages_is_refused() -> None:
    with pytest.raises(xpp.PlanError, match=r"= second.weight \(stages \[0, 1\]\)"):
        xpp.pipeline(Two(is_tied=True), mb_args=(torch.ones(2, 4),), split_spec=CUT)


class Tied(nn.Module):
    """Two uses of one weight, both before the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.first.weight
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.again(self.first(x)))


def test_a_parameter_used_twice_in_one_stage_stays_one() -> None:
    pipe = xpp.pipeline(Tied(), mb_args=(torch.ones(2, 4),), split_spec=CUT)
    stage = pipe.get_stage_module(0)
    assert stage.first.weight is stage.again.weight
    assert len(list(stage.parameters())) == 3
