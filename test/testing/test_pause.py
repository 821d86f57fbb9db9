"""Stages that pause train as others, and ranks pause at the same time."""

import time

import pytest
import torch
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds, pause

pytestmark = pytest.mark.worlds

FORWARD_S, BACKWARD_S = 0.1, 0.2
MICROBATCHES, ROWS, WIDTH = 2, 4, 6


class Paced(nn.Module):
    """Two layers that pause."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = pause(self.first(x), FORWARD_S, BACKWARD_S)
        return pause(self.last(x), FORWARD_S, BACKWARD_S)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    shape = MICROBATCHES * ROWS, WIDTH
    return torch.randn(shape), torch.randn(shape)


def train() -> tuple[list[float], dict[str, Tensor], float]:
    """Return a second step's losses, the gradients, and the seconds that it took."""
    join()
    mesh = xpp.init_device_mesh("xla", (2,), mesh_dim_names=("pp",))
    x, target = batch()
    split = {"last": SplitPoint.BEGINNING}
    pipe = xpp.pipeline(Paced(), (x[:ROWS],), split_spec=split)
    stage = pipe.build_stage(mesh.get_local_rank(), xpp.device())
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_fn)
    for _ in range(2):
        stage.submod.zero_grad()
        losses: list[Tensor] = []
        began_s = time.monotonic()
        kwargs = {"target": target, "losses": losses} if stage.is_last else {}
        schedule.step(*((x,) if stage.is_first else ()), **kwargs)
        grads = {n: p.grad.cpu() for n, p in stage.submod.named_parameters()}
        took_s = time.monotonic() - began_s
    return [float(loss) for loss in losses], grads, took_s


def test_stages_that_pause_train_as_the_unsplit_model(worlds: Worlds) -> None:
    first, last = worlds.run(train, ranks=2)
    model = Paced()
    x, target = batch()
    parts = zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
    began_s = time.monotonic()
    losses = [loss_fn(model(own), wanted) for own, wanted in parts]
    (sum(losses, torch.zeros(())) / MICROBATCHES).backward()
    took_s = time.monotonic() - began_s
    assert last[0] == pytest.approx([loss.item() for loss in losses], rel=1e-5)
    grads = first[1] | last[1]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)
    # A process pauses for all layers, a rank for its own and while it waits.
    layer_s = MICROBATCHES * (FORWARD_S + BACKWARD_S)
    assert took_s >= 2 * layer_s
    assert first[2] >= layer_s + FORWARD_S + BACKWARD_S


def test_values_of_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="of torch.float32, got torch.int64"):
        pause(torch.ones(2, dtype=torch.int64), 0.0, 0.0)
