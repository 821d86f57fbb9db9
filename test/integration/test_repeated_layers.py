"""Stages whose equal layers are repeated, not traced, train as the unsplit model."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.distributed.pipelining.schedules import Schedule1F1B
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.compile import export
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

WIDTH, NUM_LAYERS = 8, 20


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) / NUM_LAYERS


def trained() -> tuple[bool, str, list[bool]]:
    """Return whether all numbers are equal, and whether layers were repeated."""
    join()
    mesh = xpp.init_device_mesh("xla", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(NUM_LAYERS)])
    x, y = torch.randn(2, 4, 3, WIDTH)
    cut = {str(NUM_LAYERS // 2): SplitPoint.BEGINNING}
    pipe = xpp.pipeline(model, (x[:2],), split_spec=cut)
    group = mesh.get_group("pp")
    stage = pipe.build_stage(mesh.get_local_rank("pp"), xpp.device(), group)
    schedule = Schedule1F1B(stage, 2, loss_fn=F.mse_loss)
    repeated = []
    lengthen = export.lengthen

    def noted(*args: Any) -> bool:
        repeated.append(lengthen(*args))
        return repeated[-1]

    with patch.object(export, "lengthen", noted):
        report = xpp.verify(model, schedule, x, y)
    return report.is_equal, str(report), repeated


def test_gradients_are_those_of_the_unsplit_model(worlds: Worlds) -> None:
    for is_equal, report, repeated in worlds.run(trained, ranks=2):
        assert is_equal, report
        assert repeated == [True]
