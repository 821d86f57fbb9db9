"""A transformer that names its axes, trained as a pipeline and unsplit."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.mesh import presets

WIDTH, HEADS, LENGTH, ROWS = 8, 2, 4, 4
PATTERNS = xpp.AxisRules(
    parameters={
        "*.qkv.weight": ("heads", "embed"),
        "*.out.weight": ("embed", "heads"),
        "*.up.weight": ("mlp", "embed"),
        "*.up.bias": ("mlp",),
        "*.down.weight": ("embed", "mlp"),
    },
)
PRESETS = {
    "dp": presets.dp("data"),
    "fsdp": presets.fsdp("data"),
    "fsdp_once": presets.fsdp("data", gather_once=True),
    "tp": presets.tp("model"),
    "dp+tp": presets.mix(presets.dp("data"), presets.tp("model")),
    "fsdp+tp": presets.mix(presets.fsdp("data"), presets.tp("model")),
    "fsdp_once+tp": presets.mix(
        presets.fsdp("data", gather_once=True), presets.tp("model")
    ),
    "dp+cp": presets.mix(presets.dp("data"), presets.cp("model")),
    "dp+tensor_sequence": presets.mix(
        presets.dp("data"), presets.tensor_sequence("model")
    ),
}


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
    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

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
    rules: xpp.AxisRules
    frontend: str = "traced"
    ranks: int = 2
    num_microbatches: int = 4


@dataclass
class Report:
    errors: dict[str, float]
    explanation: Any


def build(job: Job, model: Model) -> Any:
    """Make this rank's stage; the mesh of a rank is data=2 x model=2."""
    mesh = xpp.init_device_mesh(
        "xla", (job.ranks, 2, 2), mesh_dim_names=("pp", "data", "model")
    )
    rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    options = {"mesh": mesh["data", "model"], "sharding": job.rules}
    if job.frontend == "manual":
        part = Part(model, rank) if job.ranks > 1 else model
        return xpp.PipelineStage(
            part, rank, job.ranks, xpp.device(), group=group, **options
        )
    pipe = xpp.pipeline(
        model,
        mb_args=(torch.zeros(ROWS, LENGTH, WIDTH),),
        split_spec={f"blocks.{i}": SplitPoint.BEGINNING for i in range(1, job.ranks)},
        activations=job.rules.activations,
    )
    return pipe.build_stage(rank, xpp.device(), group, **options)


def train(job: Job) -> Report:
    """Take one step and compare it with the unsplit model's."""
    join()
    return take_step(job)


def take_step(job: Job) -> Report:
    torch.manual_seed(0)
    reference = Model(num_blocks=job.ranks)
    stage = build(job, copy.deepcopy(reference))
    schedule = Schedule1F1B(stage, job.num_microbatches, loss_fn=loss_fn)
    rows = ROWS * job.num_microbatches
    x, y = torch.randn(2, rows, LENGTH, WIDTH)
    losses: list[Tensor] = []
    args = (x,) if stage.is_first else ()
    kwargs = {"target": y, "losses": losses} if stage.is_last else {}
    schedule.step(*args, **kwargs)
    chunks = zip(x.split(ROWS), y.split(ROWS), strict=True)
    expected = [loss_fn(reference(mb_x), mb_y) for mb_x, mb_y in chunks]
    torch.stack(expected).mean().backward()
    errors = {
        f"loss {i}": difference(loss, expected[i]) for i, loss in enumerate(losses)
    }
    named = dict(reference.named_parameters())
    for name, parameter in stage.submod.named_parameters():
        errors[name] = difference(parameter.grad, named[name].grad)
    return Report(errors, stage.explain())


def difference(got: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest difference, relative to the largest value."""
    if got is None or expected is None:
        return float("inf")
    return float((got.detach().cpu() - expected).abs().max() / expected.abs().max())
