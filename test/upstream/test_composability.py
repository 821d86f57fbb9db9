"""What upstream's test_composability asserts: other kinds of parallelism inside.

Upstream's ranks are one device each, eight for pipeline × data × tensor. Here a rank
of the pipeline is a world of devices, and the other axes are sharding within it:
FSDP shards parameters over "data", tensor parallelism over "model", and replicated
data parallelism is a batch split over "data".
"""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds
from upstream.jobs import LOOPED, SINGLE, Mlp, feed, make_schedule, outcomes, stages_of

pytestmark = pytest.mark.worlds

RANKS, WIDTH, COUNT, STEPS, NUM_LAYERS = 2, 8, 4, 5, 4
ADAMW = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, "foreach": True}
DTYPES = (torch.float32, torch.bfloat16)


class Deep(nn.Module):
    """Three maps, the first and last split by columns, the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(WIDTH, WIDTH)
        self.net2 = nn.Linear(WIDTH, WIDTH)
        self.net3 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.net1, self.net2, self.net3):
            x = F.relu(layer(x))
        return x


SHARDING_3D = {
    "*.net2.weight": ("data", "model"),
    "*.net2.bias": ("data",),
    "*.weight": ("model", "data"),
    "*.bias": ("model",),
}


def sum_of_outputs(output: Tensor, target: Tensor) -> Tensor:
    return output.float().sum()


@contextlib.contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Cast parameters for matrix products, as FSDP's mixed precision does."""
    with torch.autocast("xla", torch.bfloat16, enabled=dtype is torch.bfloat16):
        yield


def pipelined(name: str, layers: nn.ModuleList, **options: Any) -> tuple[Any, Any, Any]:
    """Make a schedule, its stages of some layers each, and an AdamW."""
    rank = dist.get_rank()
    indices = stages_of(name, rank, RANKS)
    count = RANKS * len(indices)
    each = len(layers) // count
    stages = []
    for index in indices:
        part = nn.Sequential(*copy.deepcopy(layers)[index * each : (index + 1) * each])
        stages.append(xpp.PipelineStage(part, index, count, xpp.device(), **options))
    schedule = make_schedule(
        name, stages, COUNT, loss_fn=sum_of_outputs, scale_grads=False
    )
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    return schedule, stages, torch.optim.AdamW(parameters, **ADAMW)


def trains_in_three_dimensions(name: str, dtype: torch.dtype) -> None:
    """As upstream: five steps run. The losses are numbers, too."""
    mesh = xpp.init_device_mesh(
        "xla", (RANKS, 2, 2), mesh_dim_names=("pp", "data", "model")
    )
    schedule, stages, optimizer = pipelined(
        name,
        nn.ModuleList(Deep() for _ in range(NUM_LAYERS)),
        group=mesh.get_group("pp"),
        mesh=mesh["data", "model"],
        sharding=SHARDING_3D,
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        x, target = torch.rand(2, 2 * COUNT, WIDTH)
        losses: list[Tensor] = []
        with computing_in(dtype):
            feed(schedule.step, stages, x, target, losses)
        optimizer.step()
    assert all(bool(loss.isfinite()) for loss in losses)


def replicates(name: str, dtype: torch.dtype) -> None:
    """A batch that is split over devices gives the losses of one that is not.

    In float32 the gradients are those of the unsplit model. In bfloat16 the product of
    a gradient is rounded on each device, and not once for the batch.
    """
    tolerance = {} if dtype is torch.float32 else {"rtol": 1.6e-2, "atol": 1e-5}
    mesh = xpp.init_device_mesh("xla", (RANKS, 2), mesh_dim_names=("pp", "data"))
    layers = nn.ModuleList(Mlp(WIDTH) for _ in range(NUM_LAYERS))
    model = nn.Sequential(*copy.deepcopy(layers))
    split = pipelined(name, layers, mesh=mesh["data"])
    whole = pipelined(name, layers, mesh=mesh["data"], batch_axis=None)
    expected = torch.optim.AdamW(model.parameters(), **ADAMW)
    for _ in range(STEPS):
        x, target = torch.rand(2, 2 * COUNT, WIDTH)
        found: list[list[Tensor]] = []
        for schedule, stages, optimizer in (split, whole):
            optimizer.zero_grad()
            losses: list[Tensor] = []
            with computing_in(dtype):
                feed(schedule.step, stages, x, target, losses)
            found.append([loss.cpu() for loss in losses])
        torch.testing.assert_close(*found, **tolerance)
        if dtype is torch.float32:
            expected.zero_grad()
            loss = sum_of_outputs(model(x), target)
            loss.backward()
            check_unsplit(split[1], model, found[0], loss)
            expected.step()
        for _, _, optimizer in (split, whole):
            optimizer.step()


def check_unsplit(
    stages: list[Any], model: nn.Sequential, losses: list[Tensor], loss: Tensor
) -> None:
    """Compare loss and gradients to upstream's tolerances."""
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    if losses:
        torch.testing.assert_close(sum(losses), loss.detach(), **tolerance)
    for stage in stages:
        each = len(model) // stage.num_stages
        for name, parameter in stage.submod.named_parameters():
            layer, _, rest = name.partition(".")
            full = f"{int(layer) + stage.stage_index * each}.{rest}"
            torch.testing.assert_close(
                parameter.grad.cpu(), model.get_parameter(full).grad, **tolerance
            )


class Chunk(nn.Module):
    """One layer of the model, under its name there."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): Mlp(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Saved:
    """A model and its optimizer as what DCP calls stateful."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


def saves_full_names(folder: str) -> list[str]:
    """Save a trained stage; return the names of its parameters."""
    dist.init_process_group("xla_pp")
    rank = dist.get_rank()
    stage = xpp.PipelineStage(Chunk(rank), rank, RANKS, xpp.device())
    optimizer = torch.optim.Adam(stage.submod.parameters(), lr=0.1)
    schedule = make_schedule("GPipe", [stage], COUNT, loss_fn=F.mse_loss)
    x, target = torch.rand(2, 2 * COUNT, WIDTH)
    feed(schedule.step, [stage], x, target, [])
    optimizer.step()
    dcp.save({"app": Saved(stage.submod, optimizer)}, checkpoint_id=folder)
    return list(stage.submod.state_dict())


def test_a_checkpoint_has_the_names_of_the_whole_model(
    worlds: Worlds, tmp_path: Path
) -> None:
    names = worlds.run(
        saves_full_names, ranks=RANKS, devices=2, args=(str(tmp_path / "saved"),)
    )
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "whole.pt")
    saved = torch.load(tmp_path / "whole.pt", weights_only=False)["app"]["model"]
    assert {name for of_rank in names for name in of_rank} == set(saved)
    assert len(saved) == 4 * RANKS


CASES = {
    f"replicate_pp-{name}-{str(dtype).removeprefix('torch.')}": (
        replicates,
        (name, dtype),
    )
    for name in (*SINGLE, *LOOPED)
    for dtype in DTYPES
}
CASES_3D = {
    f"3d-{name}-{str(dtype).removeprefix('torch.')}": (
        trains_in_three_dimensions,
        (name, dtype),
    )
    for name in (*SINGLE, *LOOPED)
    for dtype in DTYPES
}


@pytest.fixture(scope="module")
def found(worlds: Worlds) -> dict[str, list[str]]:
    """Run what splits the batch."""
    return outcomes(worlds, CASES, devices=2)


@pytest.fixture(scope="module")
def found_3d(worlds: Worlds) -> dict[str, list[str]]:
    """Run what splits parameters as well."""
    return outcomes(worlds, CASES_3D, devices=4)


@pytest.mark.parametrize("case", CASES)
def test_replicated_data_parallelism(found: dict[str, list[str]], case: str) -> None:
    assert found[case] == []


@pytest.mark.parametrize("case", CASES_3D)
def test_three_dimensions(found_3d: dict[str, list[str]], case: str) -> None:
    assert found_3d[case] == []
