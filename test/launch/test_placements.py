"""torch's functions for tensor parallelism annotate a model for its stages."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from integration.training import Model, loss_fn
from joining import join
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B, SplitPoint
from torch.distributed.tensor import (
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import torch_xla_pp as xpp
from torch_xla_pp import xla_compat
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


def mesh_of_job() -> Any:
    names = ("pp", "data", "model")
    return xpp.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=names)


def split_norms(name: str, module: nn.Module, mesh: Any) -> None:
    """As functions for torch's own meshes are written."""
    if isinstance(module, nn.LayerNorm):
        for key, parameter in module.named_parameters(recurse=False):
            split = nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]))
            module.register_parameter(key, split)


def parallelize() -> dict[str, Any]:
    rank, mesh = join().rank(), mesh_of_job()
    torch.manual_seed(0)
    model = Model(2)
    unsplit = copy.deepcopy(model)
    parallelize_module(model, mesh["model"], PLAN)
    distribute_module(model, mesh["model"], split_norms)
    head = distribute_tensor(model.head.weight, mesh["data", "model"], [Shard(1)] * 2)
    assert head is model.head.weight
    example = torch.zeros(4, 3, dtype=torch.long)
    pipe = xpp.pipeline(
        model, mb_args=(example,), split_spec={"blocks.1": SplitPoint.BEGINNING}
    )
    stage = pipe.build_stage(rank, xpp.device(), mesh=mesh["data", "model"])
    schedule = Schedule1F1B(stage, 2, loss_fn=loss_fn)
    x, y = torch.randint(0, 13, (2, 8, 3))
    report = xpp.verify(unsplit, schedule, x, y)
    named = dict(stage.submod.named_parameters())
    texts = xla_compat.sharding_texts(list(named.values()))
    on_device = torch.zeros(4, 4).to(xpp.device())
    distribute_tensor(on_device, mesh["model"], [Shard(0)])
    (marked,) = xla_compat.sharding_texts([on_device])
    return {
        "report": report,
        "tiles": {
            name: re.sub(r"(\{devices=\[[\d,]+\]).*", r"\1", text)
            for name, text in zip(named, texts, strict=True)
        },
        "marked": marked,
    }


def test_styles_split_weights_and_nothing_else_changes(worlds: Worlds) -> None:
    for rank, found in enumerate(worlds.run(parallelize, ranks=2, devices=4)):
        assert found["report"].is_equal, str(found["report"])
        tiles, split = found["tiles"], "{devices=[2,2]"
        block = f"blocks.{rank}"
        # Two tiles of the first or second dimension, each on two devices.
        assert tiles[f"{block}.up.weight"] == "{devices=[2,1,2]"
        assert tiles[f"{block}.up.bias"] == split
        assert tiles[f"{block}.down.weight"] == "{devices=[1,2,2]"
        assert tiles[f"{block}.down.bias"] == "{replicated}"
        assert tiles[f"{block}.norm.weight"] == split
        if rank == 1:
            assert tiles["head.weight"] == "{devices=[1,4]"
        assert found["marked"].startswith("{devices=[2,1,2]")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


SEQUENCE = {
    "*.norm": SequenceParallel(),
    "*.up": ColwiseParallel(input_layouts=Shard(1)),
    "*.down": RowwiseParallel(output_layouts=Shard(1)),
    "2": SequenceParallel(),
}


def split_the_sequence(is_traced: bool) -> tuple[Any, list[int], int]:
    rank, mesh = join().rank(), mesh_of_job()
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 8))
    unsplit = copy.deepcopy(model)
    parallelize_module(model, mesh["model"], SEQUENCE)
    slices: dict[str, Any] = {"mesh": mesh["data", "model"]}
    if is_traced:
        pipe = xpp.pipeline(
            model, (torch.zeros(4, 6, 8),), split_spec={"3": SplitPoint.BEGINNING}
        )
        stage = pipe.build_stage(rank, xpp.device(), **slices)
    else:
        part = (
            nn.Sequential(*model[:3]) if rank == 0 else nn.ModuleDict({"3": model[3]})
        )
        if rank == 1:
            part.forward = model[3].forward
        stage = xpp.PipelineStage(part, rank, 2, xpp.device(), **slices)
    schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(2, 8, 6, 8)
    report = xpp.verify(unsplit, schedule, x, y)
    made = 4 * 6 * 8 * 4
    return report, [made, stage.explain().sent_bytes], rank


@pytest.mark.parametrize("is_traced", [True, False])
def test_the_sequence_is_split_where_styles_say_so(
    worlds: Worlds, is_traced: bool
) -> None:
    args = (is_traced,)
    first, last = worlds.run(split_the_sequence, ranks=2, devices=4, args=args)
    for report, _, _ in (first, last):
        assert report.is_equal, str(report)
    # Rows are split over two devices, and the sequence over two.
    whole, sent = first[1]
    assert sent == whole // 4


def refuse(call: Callable[[nn.Module, Any], Any]) -> None:
    join()
    call(nn.Linear(4, 4), mesh_of_job()["model"])


def norm(_: nn.Module, mesh: Any) -> None:
    both = mesh_of_job()["data", "model"]
    distribute_module(nn.LayerNorm(4), both, SequenceParallel()._replicate_module_fn)


def sequence_output(module: nn.Module, mesh: Any) -> None:
    parallelize_module(module, mesh, ColwiseParallel(output_layouts=Shard(1)))


def inputs(module: nn.Module, mesh: Any) -> None:
    layouts: Any = {"input_layouts": Replicate(), "desired_input_layouts": Shard(1)}
    found = parallelize_module(module, mesh, PrepareModuleInput(**layouts))
    found(torch.zeros(2, 4, 4))


def input_function(module: nn.Module, mesh: Any) -> None:
    distribute_module(module, mesh, None, lambda mod, values, mesh: values)


def fsdp(module: nn.Module, mesh: Any) -> None:
    fully_shard(module, mesh=mesh)


def sums(module: nn.Module, mesh: Any) -> Tensor:
    return distribute_tensor(module.weight, mesh, [Partial()])


def many(module: nn.Module, mesh: Any) -> Tensor:
    return distribute_tensor(module.weight, mesh, [Shard(0), Shard(1)])


def beyond(module: nn.Module, mesh: Any) -> Tensor:
    return distribute_tensor(module.weight, mesh, [Shard(2)])


def uneven(module: nn.Module, mesh: Any) -> None:
    odd = nn.Linear(3, 3)
    distribute_tensor(odd.weight, mesh, [Shard(0)])
    xpp.PipelineStage(odd, dist.get_rank(), 2, xpp.device(), mesh=mesh)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (norm, "SequenceParallel: expected one axis of the mesh, got RankMesh"),
        (sequence_output, "ColwiseParallel: expected layouts .*tensor_sequence"),
        (inputs, "get_coordinate: expected an axis over processes"),
        (input_function, "got input_fn or output_fn"),
        (fsdp, "presets.fsdp for fully_shard"),
        (sums, "expected Shard or Replicate"),
        (many, "expected a placement for each axis of RankMesh"),
        (beyond, "expected a dimension of"),
        (uneven, "weight: .* does not divide over 'model' of size 2"),
    ],
)
def test_what_does_not_map_is_refused_with_what_does(
    worlds: Worlds, call: Callable[[nn.Module, Any], Any], text: str
) -> None:
    for outcome in worlds.run_outcomes(
        refuse, ranks=2, devices=4, args=(call,), keep_workers=True
    ):
        assert outcome.error in ("ValueError", "RuntimeError")
        assert re.search(text, outcome.message, re.DOTALL), outcome.message
