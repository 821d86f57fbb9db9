"""A transformer that names its axes, trained as a pipeline and unsplit."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from joining import join
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B, SplitPoint
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
from torch.distributed.tensor import (
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.mesh import presets

WIDTH, HEADS, LENGTH, ROWS, NUM_EXPERTS = 8, 2, 4, 4, 4
PATTERNS = xpp.AxisRules(
    parameters={
        "*.qkv.weight": ("heads", "embed"),
        "*.out.weight": ("embed", "heads"),
        "*.up.weight": ("mlp", "embed"),
        "*.up.bias": ("mlp",),
        "*.down.weight": ("embed", "mlp"),
    },
)
EXPERTS = xpp.AxisRules(
    parameters={
        "*.up": ("expert", "embed", "mlp"),
        "*.down": ("expert", "mlp", "embed"),
    },
)
PRESETS = {
    "dp": presets.dp("data"),
    "fsdp": presets.fsdp("data"),
    "fsdp_once": presets.fsdp("data", gather_once=True),
    "fsdp_transpose": presets.fsdp_transpose("data"),
    "tp": presets.tp("model"),
    "tp_transpose": presets.tp_transpose("model"),
    "dp+tp": presets.mix(presets.dp("data"), presets.tp("model")),
    "fsdp+tp": presets.mix(presets.fsdp("data"), presets.tp("model")),
    "fsdp_once+tp": presets.mix(
        presets.fsdp("data", gather_once=True), presets.tp("model")
    ),
    "dp+cp": presets.mix(presets.dp("data"), presets.cp("model")),
    "dp+sp": presets.mix(presets.dp("data"), presets.sp("model")),
    "dp+tensor_sequence": presets.mix(
        presets.dp("data"), presets.tensor_sequence("model")
    ),
    "ep": presets.ep("data"),
}


class Experts(nn.Module):
    """Experts to which each token goes with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = xpp.shard(x, "batch", "norm_sequence", "embed")
        shares = self.router(self.norm(x)).softmax(-1)
        tokens = torch.einsum("bse,bsd->ebsd", shares, x)
        tokens = xpp.shard(tokens, "expert", None, None, "embed")
        hidden = torch.einsum("ebsd,edf->ebsf", tokens, self.up).relu()
        done = torch.einsum("ebsf,efd->ebsd", hidden, self.down)
        done = xpp.shard(done, "expert", None, None, "embed")
        back = xpp.shard(done, None, "batch", "norm_sequence", "embed")
        return xpp.shard(x + back.sum(0), "batch", "norm_sequence", "embed")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = xpp.shard(x, "batch", "norm_sequence", "embed")
        # Heads come first in the weight, so that a part of it is whole heads.
        parts = self.qkv(self.norm(x)).unflatten(-1, (HEADS, 3, -1))
        q, k, v = parts.unbind(-2)
        q = xpp.shard(q, "batch", "sequence", "heads", "head_dim")
        k = xpp.shard(k, "batch", "key_sequence", "kv_heads", "head_dim")
        v = xpp.shard(v, "batch", "key_sequence", "kv_heads", "head_dim")
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2)
        x = x + xpp.shard(self.out(mixed), "batch", "norm_sequence", "embed")
        hidden = xpp.shard(F.gelu(self.up(x)), "batch", "sequence", "mlp")
        return xpp.shard(x + self.down(hidden), "batch", "norm_sequence", "embed")


class Model(nn.Module):
    def __init__(self, num_blocks: int = 2, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Part(nn.Module):
    """One stage of `Model`, cut out by hand, with the model's parameter names."""

    def __init__(self, model: Model, stage: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(stage): model.blocks[stage]})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@dataclass(frozen=True, kw_only=True)
class Job:
    rules: xpp.AxisRules | None
    frontend: str = "traced"
    ranks: int = 2
    num_microbatches: int = 4
    block: type[nn.Module] = Block
    is_v: bool = False
    # What torch's `distribute_module` shards: a "part", the "stage" made of it, or "".
    distributed: str = ""
    # Devices along each of the two axes of a rank's mesh.
    axis_size: int = 2

    @property
    def num_stages(self) -> int:
        return self.ranks * (2 if self.is_v else 1)


@dataclass
class Report:
    errors: dict[str, float]
    explanation: Any


def build(job: Job, model: Model) -> list[Any]:
    """Make this rank's stages; the mesh of a rank has the axes data and model."""
    sizes = (job.ranks, job.axis_size, job.axis_size)
    mesh = xpp.init_device_mesh("xla", sizes, mesh_dim_names=("pp", "data", "model"))
    rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    options = {"mesh": mesh["data", "model"], "sharding": job.rules}
    count = job.num_stages
    indices = [rank, count - 1 - rank] if job.is_v else [rank]
    if job.frontend == "manual":
        parts = [Part(model, index) if count > 1 else model for index in indices]
        if job.distributed == "part":
            parts = [distributed(part.to("xla"), wrap_too=True) for part in parts]
        stages = [
            xpp.PipelineStage(part, i, count, xpp.device(), group=group, **options)
            for i, part in zip(indices, parts, strict=True)
        ]
        if job.distributed == "stage":
            for stage in stages:
                distributed(stage.submod)
        return stages
    pipe = xpp.pipeline(
        model,
        mb_args=(torch.zeros(ROWS, LENGTH, WIDTH),),
        split_spec={f"blocks.{i}": SplitPoint.BEGINNING for i in range(1, count)},
        activations=job.rules.activations if job.rules else None,
    )
    return [pipe.build_stage(i, xpp.device(), group, **options) for i in indices]


def distributed(module: nn.Module, *, wrap_too: bool = False) -> nn.Module:
    """Shard all weights over the axis `model`, as scripts for torch_xla alone do."""
    mesh = DeviceMesh("xla", torch.arange(4).reshape(2, 2))

    def shard(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
        if isinstance(part, nn.Linear):
            placements = [Replicate(), Shard(0)]
            wrapped = distribute_tensor(part.weight, mesh, placements)
            if wrap_too:
                part.weight = nn.Parameter(wrapped)

    return distribute_module(module, mesh, shard)


def train(job: Job) -> Report:
    """Take one step and compare it with the unsplit model's."""
    join()
    return take_step(job)


def take_step(job: Job) -> Report:
    torch.manual_seed(0)
    reference = Model(job.num_stages, job.block)
    stages = build(job, copy.deepcopy(reference))
    schedule: Any = (
        ScheduleZBVZeroBubble(stages, job.num_microbatches, loss_fn=loss_fn)
        if job.is_v
        else Schedule1F1B(stages[0], job.num_microbatches, loss_fn=loss_fn)
    )
    rows = ROWS * job.num_microbatches
    x, y = torch.randn(2, rows, LENGTH, WIDTH)
    losses: list[Tensor] = []
    args = (x,) if stages[0].is_first else ()
    kwargs = {"target": y, "losses": losses} if stages[-1].is_last else {}
    schedule.step(*args, **kwargs)
    chunks = zip(x.split(ROWS), y.split(ROWS), strict=True)
    expected = [loss_fn(reference(mb_x), mb_y) for mb_x, mb_y in chunks]
    torch.stack(expected).mean().backward()
    errors = {
        f"loss {i}": difference(loss, expected[i]) for i, loss in enumerate(losses)
    }
    named = dict(reference.named_parameters())
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            errors[name] = difference(parameter.grad, named[name].grad)
    return Report(errors, stages[0].explain())


def difference(got: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest difference, relative to the largest value."""
    if got is None or expected is None:
        return float("inf")
    return float((got.detach().cpu() - expected).abs().max() / expected.abs().max())
