"""A stage that draws random numbers of Python is warned of, as its programs do not."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torch_xla_pp as xpp
from torch_xla_pp.compile import export_joint


class Noisy(nn.Module):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.linear, self.source = nn.Linear(4, 4), source

    def forward(self, x: Tensor) -> Tensor:
        scale: float | Tensor = torch.rand(())
        if self.source == "random":
            scale = random.random()
        elif self.source == "numpy.random":
            scale = float(np.random.rand())  # noqa: NPY002
        return self.linear(x) * scale


@pytest.mark.parametrize("source", ["random", "numpy.random", "torch"])
def test_numbers_that_every_step_would_repeat_are_warned_of(
    source: str, caplog: pytest.LogCaptureFixture
) -> None:
    export_joint(Noisy(source), (torch.zeros(2, 4),), {})
    own = [r for r in caplog.records if r.name.startswith(xpp.__name__)]
    found = "\n".join(record.getMessage() for record in own)
    is_drawn = f"drew random numbers of {source} while it was traced" in found
    assert is_drawn == (source != "torch") == bool(found)
