"""What a stage says of its costs is true."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.compile import Explanation, ProgramCost
from torch_xla_pp.hlo import Collective
from torch_xla_pp.mesh import LocalMesh, presets
from torch_xla_pp.testing import Worlds

ROWS, LENGTH, WIDTH, CLASSES = 2, 6, 16, 40


@pytest.mark.pure
def test_an_explanation_reads_like_this() -> None:
    gather = Collective(kind="all-gather", axes=("data",), count=2, num_bytes=64)
    explanation = Explanation(
        stage=1,
        num_parameters=8,
        parameter_bytes=16,
        received_bytes=32,
        sent_bytes=20,
        programs=(
            ProgramCost(name="forward", collectives=(gather,), flops=160),
            ProgramCost(name="inference", collectives=()),
        ),
        reduced_per_microbatch={"up": "flip is not cut", "down": "flip is not cut"},
        moves=("float32[8] from stage 0: 4 on 4 devices -> 2 on 2 devices",),
    )
    assert str(explanation).splitlines() == [
        "stage 1, on each device",
        "  16 bytes of 8 parameters and of buffers",
        "  32 bytes in, 20 bytes out, per microbatch, 8 FLOP per byte out",
        "    float32[8] from stage 0: 4 on 4 devices -> 2 on 2 devices",
        "  gradients reduced in every microbatch, as flip is not cut: up, down",
        "  forward: 160 FLOP",
        "    2 all-gather over data: 64 bytes, 2.5 FLOP per byte",
        "  inference: 0 FLOP",
        "    no collectives",
    ]


@pytest.mark.pure
def test_an_explanation_for_a_device_says_what_would_bound_it() -> None:
    gather = Collective(kind="all-gather", axes=("data",), count=2, num_bytes=64)
    summed = Collective(kind="all-reduce", axes=("model", "data"), count=1, num_bytes=8)
    other = Collective(kind="all-reduce", axes=None, count=1, num_bytes=8)
    explanation = Explanation(
        stage=1,
        num_parameters=8,
        parameter_bytes=16,
        received_bytes=32,
        sent_bytes=20,
        programs=(
            ProgramCost(name="forward", collectives=(gather, other), flops=160),
            ProgramCost(name="backward", collectives=(), flops=320),
            ProgramCost(name="gradient reduction", collectives=(summed,)),
            ProgramCost(name="inference", collectives=None, flops=None),
        ),
        sends=True,
        num_microbatches=4,
        mesh=LocalMesh(names=("data", "model"), shape=(2, 4)),
        rules=presets.fsdp("data"),
    ).among(3, 1, "v5e")
    bounds = {bound.axis: bound for bound in xpp.advise(explanation).bounds}
    # A device sends half of what it gathers, and 14 of 8 of what it sums.
    assert bounds["data"].strategy == "fsdp"
    assert bounds["data"].intensity == 160 / 32
    assert bounds["model+data"].intensity == 4 * 320 / 14
    assert bounds["pp"].intensity == 160 / 20
    text = str(explanation)
    assert "  for v5e, from peaks; nothing was measured\n    fsdp over data" in text
    assert "6 microbatches, two for each rank, in place of 4" in text
    unknown = replace(explanation, programs=explanation.programs[3:])
    with pytest.raises(ValueError, match="expected the HLO of programs, got none"):
        xpp.advise(unknown)


@pytest.mark.pure
def test_without_a_dump_the_collectives_are_said_to_be_unknown() -> None:
    cost = ProgramCost(name="forward", collectives=None)
    assert str(cost).startswith("  forward: unknown: set XLA_FLAGS='--xla_dump_to=")


class Attention(nn.Module):
    """Products of two matrices, and of batches of them."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v))


def explained() -> tuple[dict[str, int], dict[str, int]]:
    """Return the FLOP of each program, and of those of a second schedule."""
    join()
    stage = xpp.PipelineStage(Attention(), 0, 1, xpp.device())
    x, y = torch.randn(2, ROWS, LENGTH, WIDTH), torch.randn(2, ROWS, LENGTH, CLASSES)
    found = []
    for _ in range(2):
        schedule = ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)
        schedule.step(x.flatten(0, 1), target=y.flatten(0, 1))
        if not found:
            (joined,) = stage.explain().programs
            assert stage.explain().load().stages[0].flops == {"B": joined.flops}
        # Forward and backward are apart where the output is taken.
        _ = schedule.step(x.flatten(0, 1), target=y.flatten(0, 1))
        programs = stage.explain().programs
        found.append({program.name: program.flops for program in programs})
    load = stage.explain(device="v5e").load()
    assert load.machine is not None and load.machine.name == "v5e"
    assert (load.num_microbatches, load.num_ranks, load.stages_per_rank) == (2, 1, 1)
    assert load.stages[0].flops == {"F": found[0]["forward"], "B": found[0]["backward"]}
    return found[0], found[1]


@pytest.mark.worlds
@pytest.mark.parametrize("products", ["torch", "xla"])
def test_flops_are_those_of_the_module_whoever_multiplies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, products: str
) -> None:
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("TORCH_XLA_PP_PRODUCTS", products)
    with Worlds() as worlds:
        ((first, second),) = worlds.run(explained, ranks=1)
    tokens = ROWS * LENGTH
    linear = {
        "into": 2 * tokens * WIDTH * 3 * WIDTH,
        "out": 2 * tokens * WIDTH * CLASSES,
    }
    attention = 2 * (2 * ROWS * LENGTH * LENGTH * WIDTH)
    forward = linear["into"] + linear["out"] + attention
    # Nobody needs the gradient of the input.
    backward = linear["into"] + 2 * linear["out"] + 2 * attention
    assert first == {
        "forward": forward,
        "backward": backward,
        "forward and backward": forward + backward,
    }
    assert second == first
