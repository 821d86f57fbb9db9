"""Stages give values to their own part of a model that has no memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from integration.test_parity import check
from integration.training import Job, Model, Part, train
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

NUM_BLOCKS = 4
SHARDINGS: dict[tuple[str, ...], dict[str, Any]] = {
    ("data",): {"*.up.weight": ("data", None), "*.down.weight": (None, "data")},
    ("data", "model"): {
        "*.up.weight": ("data", "model"),
        "*.up.bias": (("model", "data"),),
        "*.down.weight": ("model", None),
    },
}


@pytest.mark.parametrize("frontend", ["traced", "manual"])
def test_a_deferred_model_trains_as_one_process(worlds: Worlds, frontend: str) -> None:
    job = Job(
        init_device="deferred",
        frontend=frontend,
        is_tied=True,
        num_steps=1,
        devices=2,
        sharding={"*.up.weight": ("data", None)},
    )
    check(worlds.run(train, ranks=2, devices=2, args=(job,)))


class Scaled(Model):
    """A model with a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS)
        self.register_buffer("scale", torch.arange(13.0).pow(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale


def make() -> Scaled:
    torch.manual_seed(0)
    with xpp.deferred_init():
        return Scaled()


def check_splits(axes: tuple[str, ...], splits: tuple[int, ...]) -> None:
    """Compare the values of the stages of some splits with those of the whole."""
    join()
    whole = xpp.materialize(make())
    expected = dict(whole.named_parameters()) | dict(whole.named_buffers())
    sizes = (1, *[2] * len(axes))
    mesh = xpp.init_device_mesh("xla", sizes, mesh_dim_names=("pp", *axes))
    options = {"mesh": mesh[axes], "sharding": SHARDINGS[axes]}
    for num_stages in splits:
        cuts = range(1, NUM_BLOCKS, NUM_BLOCKS // num_stages)
        pipe = xpp.pipeline(
            make(),
            mb_args=(torch.zeros(2, 3, dtype=torch.long),),
            split_spec={
                f"blocks.{i}": SplitPoint.BEGINNING for i in cuts[: num_stages - 1]
            },
        )
        seen = set()
        for index in range(num_stages):
            stage = pipe.build_stage(index, xpp.device(), **options)
            seen |= compare(stage.submod, expected)
        assert seen == set(expected)
    model = make()
    for index in range(NUM_BLOCKS):
        stage = xpp.PipelineStage(
            Part(model, index), index, NUM_BLOCKS, xpp.device(), **options
        )
        compare(stage.submod, expected)


def compare(module: nn.Module, expected: dict[str, Tensor]) -> set[str]:
    found = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, value in found.items():
        assert torch.equal(value.detach().cpu(), expected[name].detach()), name
    return set(found)


@pytest.mark.parametrize(
    ("axes", "splits"), [(("data",), (1, 2, 4)), (("data", "model"), (2,))]
)
def test_values_are_equal_for_every_split_and_mesh(
    worlds: Worlds, axes: tuple[str, ...], splits: tuple[int, ...]
) -> None:
    worlds.run(check_splits, ranks=1, devices=2 ** len(axes), args=(axes, splits))


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def peak_of_a_build(width: int) -> int:
    """Return by how many bytes this process grew at most while it built a stage.

    It is the first of eight; devices of the CPU have their memory in the process.
    """
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _bytes_of(status, "VmRSS")
    mesh = xpp.init_device_mesh("xla", (1, 2), mesh_dim_names=("pp", "data"))
    with xpp.deferred_init():
        model = Wide(width)
    pipe = xpp.pipeline(
        model,
        mb_args=(torch.zeros(2, width),),
        split_spec={f"layers.{i}": SplitPoint.BEGINNING for i in range(2, 16, 2)},
    )
    sharding = {"*.weight": ("data", None)}
    pipe.build_stage(0, xpp.device(), mesh=mesh["data"], sharding=sharding)
    return _bytes_of(status, "VmHWM") - before


def _bytes_of(status: Path, name: str) -> int:
    (line,) = [x for x in status.read_text().splitlines() if x.startswith(name)]
    return int(line.split()[1]) * 1024


def peaks() -> tuple[int, int]:
    join()
    return peak_of_a_build(16), peak_of_a_build(2896)


def test_a_stage_needs_host_memory_for_itself_and_single_parameters(
    worlds: Worlds,
) -> None:
    ((_, peak),) = worlds.run(peaks, ranks=1, devices=2)
    largest = 4 * 2896 * 2896
    # Of its two large parameters the stage has a shard on each device; each one is
    # made on the host, cut, and copied, and some copies end late.
    assert 2 * largest < peak < (2 + 6) * largest, peak / largest
    assert peak < 16 * largest / 2
