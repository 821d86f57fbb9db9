"""What upstream's test_transformer asserts: a split keeps every layer."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint

import torch_xla_pp as xpp
from upstream.jobs import WIDTH, Stack

pytestmark = pytest.mark.pure

NUM_LAYERS, NUM_STAGES = 8, 2


def names_of_layers(module: nn.Module) -> list[str]:
    return [name for name, _ in module.layers.named_children()]


def test_a_split_keeps_every_layer_and_the_output() -> None:
    model, x = Stack(NUM_LAYERS), torch.randn(4, WIDTH)
    spec = {f"layers.{NUM_LAYERS // NUM_STAGES}": SplitPoint.BEGINNING}
    pipe = xpp.pipeline(model, mb_args=(x,), split_spec=spec)
    assert pipe.num_stages == NUM_STAGES
    stages = [pipe.get_stage_module(i) for i in range(NUM_STAGES)]
    kept = [name for stage in stages for name in names_of_layers(stage)]
    assert sorted(kept) == sorted(names_of_layers(model))
    torch.testing.assert_close(pipe(x)[0], model(x))
