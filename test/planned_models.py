"""Models to plan, and plans for them that a test makes by hand."""

from collections.abc import Mapping, Sequence

import torch
from integration.training import Model as Chain
from torch import Tensor, nn
from torch.nn import functional as F

from torch_xla_pp import deferred_init
from torch_xla_pp.planner import PipelinePlan
from torch_xla_pp.planner.evaluation import RankBytes
from torch_xla_pp.planner.plan_values import (
    CostSource,
    PlannedBatch,
    PlannedModel,
    PlannedRank,
    PlannedSchedule,
    PlannedStage,
    PredictedRank,
    PredictedStage,
    Prediction,
    SearchCounts,
)
from torch_xla_pp.simulate.costs import edge_flows
from torch_xla_pp.work import Work, WorkGraph

ROWS, LENGTH, WIDTH, VOCAB = 4, 8, 16, 13


class Block(nn.Module):
    """A block with attention under a mask that is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(LENGTH, LENGTH).tril().log()
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) + mask).softmax(-1)
        x = x + self.out(scores @ v)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skipping(nn.Module):
    """A U-Net, whose values skip the middle; a norm writes its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e, f = self.layers
        first = a(x).relu()
        second = self.norm(b(first)).relu()
        third = d(c(second).tanh()) + second
        halves = e(third + first).chunk(2, 1)
        return f(torch.cat([halves[1], halves[0]], 1)) * x.sum(1, keepdim=True)


class Branches(nn.Module):
    """Two inputs, a branch for each, and a join; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left = branch()
        self.right = branch()
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.left(x), self.right(y)
        return self.head(torch.cat([left, right], 1)), left.mean(1)


def branch() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))


def model_of(name: str) -> nn.Module:
    """Return a model with equal values at each call."""
    torch.manual_seed(0)
    if name == "tied":
        return Chain(3, is_tied=True)
    if name == "block":
        return GPT(1)
    return {"gpt": GPT, "skips": Skipping, "branches": Branches}[name]()


def deferred_model_of(name: str) -> nn.Module:
    """Return the same under `deferred_init`."""
    with deferred_init():
        return model_of(name)


NAMES = ("gpt", "tied", "skips", "branches")


def batch_of(name: str, rows: int = ROWS, seed: int = 1) -> tuple[Tensor, ...]:
    """Return arguments for a model."""
    generator = torch.Generator().manual_seed(seed)
    if name in ("gpt", "block", "tied"):
        return (torch.randint(VOCAB, (rows, LENGTH), generator=generator),)
    count = 2 if name == "branches" else 1
    return tuple(torch.randn(count, rows, WIDTH, generator=generator))


def plan_of(
    work: WorkGraph,
    parts: Sequence[Sequence[Work]],
    *,
    placement: Sequence[int] = (),
    schedule: str = "1f1b",
    microbatches: int = 4,
    replicas: int = 1,
    remat: str = "none",
    mesh: Mapping[str, int] | None = None,
    rules: tuple[str, ...] = (),
) -> PipelinePlan:
    """Return the plan of given stages, without predictions.

    Args:
        work: The model's work.
        parts: The works of each stage.
        placement: Rank of each stage, by default one of its own.
        schedule: Name of the order of actions.
        microbatches: Number of microbatches.
        replicas: Number of pipelines.
        remat: What all stages compute again.
        mesh: Axes of each rank's devices.
        rules: Presets that share a rank's work.
    """
    placement = placement or range(len(parts))
    num_ranks = max(placement) + 1
    mesh = mesh or {}
    home = {one.name: i for i, part in enumerate(parts) for one in part}
    pairs = {
        (0 if value.producer is None else home[value.producer], home[user])
        for value in work.values
        for user in value.users
    }
    held = {p.name: p.bytes for one in work.works for p in one.parameters}
    devices = max(1, *mesh.values()) if mesh else 1
    rank = PlannedRank(
        devices=devices,
        device="cpu",
        mesh=mesh,
        rules=rules,
        batch_axis="data" if "data" in mesh else None,
        capacity_bytes=0,
    )
    nothing = RankBytes(
        parameters=0,
        gradients=0,
        optimizer=0,
        saved=0,
        passed=0,
        outputs=0,
        temporary=0,
    )
    idle = PredictedStage(
        forward_s=0,
        input_s=0,
        weight_s=0,
        final_s=0,
        saved_bytes=0,
        passed_bytes=0,
    )
    return PipelinePlan(
        model=PlannedModel(
            digest=work.digest,
            num_ops=work.num_ops,
            parameter_bytes=sum(held.values()),
            op_digests=work.op_digests,
        ),
        batch=PlannedBatch(
            rows=replicas * microbatches * work.rows,
            replicas=replicas,
            microbatches=microbatches,
            rows_per_microbatch=work.rows,
        ),
        stages=tuple(
            PlannedStage(
                rank=placement[i],
                ops=tuple(op for one in part for op in one.ops),
                modules=(),
                remat=remat,
                inputs=(),
            )
            for i, part in enumerate(parts)
        ),
        ranks=(rank,) * num_ranks,
        schedule=PlannedSchedule(
            name=schedule, stages_per_rank=len(parts) // num_ranks
        ),
        predicted=Prediction(
            step_s=0,
            rows_per_s=0,
            bubble=0,
            depth=0,
            ranks=(PredictedRank(busy_s=0, live=0, bytes=nothing),) * num_ranks,
            stages=(idle,) * len(parts),
            flows=edge_flows(sorted((a, b) for a, b in pairs if a != b), 0),
        ),
        costs=CostSource(
            source="none",
            device="cpu",
            is_verified=False,
            optimizer_bytes=2,
            links=(),
        ),
        reasons=(),
        alternatives=(),
        baselines={},
        search=SearchCounts(settings=0, pruned=0, evaluated=0),
    )
