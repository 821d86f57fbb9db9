"""A pipeline in one SPMD program equals its layers in a row."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.sharded import LENGTH, WIDTH, Block, difference
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

import torch_xla_pp as xpp
from torch_xla_pp.mesh import presets
from torch_xla_pp.testing import Worlds

STAGES, MICROBATCHES, REPEATS = 2, 4, 2
AXES = ("batch", "norm_sequence", "embed")


@pytest.mark.pure
@pytest.mark.parametrize(
    ("stages", "microbatches", "repeats", "layers"),
    [
        (1, 1, 1, 1),
        (2, 3, 1, 2),
        (4, 2, 1, 8),
        (2, 2, 2, 4),
        (3, 5, 2, 12),
        (2, 2, 3, 6),
    ],
)
def test_outputs_and_gradients_are_those_of_the_layers(
    stages: int, microbatches: int, repeats: int, layers: int
) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(layers)]
    piped = xpp.spmd_pipeline(
        blocks,
        num_stages=stages,
        num_microbatches=microbatches,
        num_repeats=repeats,
    )
    x = torch.randn(2 * microbatches, 4)
    output, expected = piped(x), nn.Sequential(*blocks)(x)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    gradients = torch.stack([block[0].weight.grad for block in blocks])
    piped_grad = piped.layers[0].weight.grad.transpose(0, 1).flatten(0, 2)
    torch.testing.assert_close(piped_grad, gradients)


@pytest.mark.pure
def test_wrong_arguments_are_named_at_once() -> None:
    blocks = [nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.Linear(3, 3)]
    with pytest.raises(ValueError, match="multiple of 2 stages x 2 repeats") as caught:
        xpp.spmd_pipeline(blocks, num_stages=2, num_microbatches=1, num_repeats=2)
    text = str(caught.value)
    assert "at least 2 microbatches for 2 stages with 2 repeats, got 1" in text
    assert (
        "expected bias of layer 1 to be as in layer 0, [2] torch.float32, got" in text
    )
    assert "expected weight of layer 2 to be as in layer 0" in text
    with pytest.raises(ValueError, match="expected positive numbers"):
        xpp.spmd_pipeline(blocks, num_stages=0, num_microbatches=1)
    piped = xpp.spmd_pipeline(blocks[:1], num_stages=1, num_microbatches=2)
    with pytest.raises(ValueError, match="2 microbatches divide, got 3 rows"):
        piped(torch.zeros(3, 2))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train() -> tuple[dict[str, float], Any]:
    """Take a step on stages x data devices; return the errors and the explanation."""
    join()
    torch.manual_seed(0)
    blocks = [Block() for _ in range(STAGES * REPEATS)]
    reference = nn.Sequential(*copy.deepcopy(blocks))
    mesh = xpp.init_device_mesh(
        "xla", (1, 2, 2), mesh_dim_names=("pp", "stage", "data")
    )
    piped = xpp.spmd_pipeline(
        blocks,
        num_stages=STAGES,
        num_microbatches=MICROBATCHES,
        num_repeats=REPEATS,
        axes=AXES,
    )
    stage = xpp.PipelineStage(
        piped,
        0,
        1,
        xpp.device(),
        group=mesh.get_group("pp"),
        mesh=mesh["stage", "data"],
        sharding=presets.dp("data") | piped.axis_rules("stage"),
    )
    x, y = torch.randn(2, 2 * MICROBATCHES, LENGTH, WIDTH)
    losses: list[Tensor] = []
    ScheduleGPipe(stage, 1, loss_fn=loss_fn).step(x, target=y, losses=losses)
    expected = loss_fn(reference(x), y)
    expected.backward()
    errors = {"loss": difference(losses[0], expected)}
    named = dict(reference.named_parameters())
    for name, parameter in piped.layers.named_parameters():
        gradients = parameter.grad.cpu().transpose(0, 1).flatten(0, 2)
        for index, gradient in enumerate(gradients):
            key = f"{index}.{name}"
            errors[key] = difference(gradient, named[key].grad)
    return errors, stage.explain()


@pytest.mark.worlds
def test_a_step_equals_the_layers_and_shifts_by_permutations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    monkeypatch.setenv("XLA_FLAGS", flags)
    with Worlds() as worlds:
        ((errors, explanation),) = worlds.run(train, ranks=1, devices=4)
    assert max(errors.values()) < 1e-5, errors
    counts = [
        {(c.kind, c.axes): c.count for c in program.collectives}
        for program in explanation.programs
    ]
    # The last shift is used by nobody.
    shifts = {("collective-permute", ("stage",)): REPEATS * MICROBATCHES + STAGES - 2}
    forward, backward = counts
    assert forward == shifts | {("all-reduce", ("stage",)): 1}
    backward.pop(("all-reduce", ("data",)))
    assert backward == shifts
