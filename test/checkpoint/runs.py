"""Train a small model at some layout, from a checkpoint and into one."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp import xla_compat
from torch_xla_pp.checkpoint import State

WIDTH, VOCAB, BLOCKS, ROWS, COUNT = 8, 12, 4, 16, 4
SHARDINGS = {
    ("data",): {},
    ("model",): {"*.weight": ("model", None), "*.up.bias": ("model",)},
    ("data", "model"): {"*.up.weight": ("model", None), "*.bias": (None,)},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.full((WIDTH,), 0.9), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return x + self.drop(self.down(F.gelu(self.up(x)))) * self.scale


class Net(nn.Module):
    """A model with tied weights, a value that skips stages, dropout, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x + first)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


class Loader:
    """A loader of batches, which counts them."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.position)
        self.position += 1
        x = torch.randint(VOCAB, (ROWS,), generator=generator)
        return x, (3 * x + 1) % VOCAB

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    schedule: str = "1F1B"
    ranks: int = 1
    replicas: int = 1
    axes: tuple[str, ...] = ("data",)
    sizes: tuple[int, ...] = (1,)

    @property
    def devices(self) -> int:
        return torch.Size(self.sizes).numel()

    def stages_of(self, rank: int) -> tuple[int, ...]:
        if self.schedule == "1F1B":
            return (rank,)
        if self.schedule == "ZBVZeroBubble":
            return (rank, 2 * self.ranks - 1 - rank)
        return (rank, rank + self.ranks)

    @property
    def num_microbatches(self) -> int:
        return COUNT // self.replicas

    @property
    def num_stages(self) -> int:
        return self.ranks * len(self.stages_of(0))


class Run:
    """A run of this rank."""

    def __init__(self, layout: Layout, seed: int = 0) -> None:
        sizes, names = (layout.ranks, *layout.sizes), ("pp", *layout.axes)
        if layout.replicas > 1:
            sizes, names = (layout.replicas, *sizes), ("dp", *names)
        mesh = xpp.init_device_mesh("xla", sizes, mesh_dim_names=names)
        torch.manual_seed(seed)
        each = BLOCKS // layout.num_stages
        pipe = xpp.pipeline(
            Net(),
            mb_args=(torch.zeros(ROWS // COUNT, dtype=torch.long),),
            split_spec={
                f"blocks.{i * each}": SplitPoint.BEGINNING
                for i in range(1, layout.num_stages)
            },
        )
        more = {"replicas": mesh.get_group("dp")} if layout.replicas > 1 else {}
        self.layout = layout
        self.replica = mesh.get_local_rank("dp") if layout.replicas > 1 else 0
        self.stages = [
            pipe.build_stage(
                index,
                xpp.device(),
                mesh.get_group("pp"),
                mesh=mesh[layout.axes],
                sharding=SHARDINGS[layout.axes],
                **more,
            )
            for index in layout.stages_of(mesh.get_local_rank("pp"))
        ]
        parameters = [p for stage in self.stages for p in stage.submod.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        self.schedule = get_schedule_class(layout.schedule)(
            self.stages if len(self.stages) > 1 else self.stages[0],
            layout.num_microbatches,
            loss_fn=loss_fn,
        )
        self.rates = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        self.loader = Loader()
        self.extra = {"rates": self.rates, "loader": self.loader, "note": 0}
        self.state = State(
            stages=self.stages,
            optimizer=self.optimizer,
            schedule=self.schedule,
            extra=self.extra,
        )

    def step(self) -> float:
        """Train on one batch; return the mean loss, 0 where it is not known."""
        x, y = (v.chunk(self.layout.replicas)[self.replica] for v in next(self.loader))
        losses: list[Tensor] = []
        args = (x.to(xpp.device()),) if self.stages[0].is_first else ()
        kwargs: dict[str, Any] = {}
        if any(stage.is_last for stage in self.stages):
            kwargs = {"target": y.to(xpp.device()), "losses": losses}
        self.schedule.step(*args, **kwargs)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rates.step()
        return sum(loss.item() for loss in losses) / self.layout.num_microbatches

    def mean(self, loss: float) -> float:
        """Return the mean of a loss over replicas, on every rank."""
        total = torch.tensor([loss], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / self.layout.replicas

    def values(self) -> dict[str, Tensor]:
        """Return all that a step changes, by name."""
        found: dict[str, Tensor] = {}
        for stage in self.stages:
            names = {id(p): name for name, p in stage.submod.named_parameters()}
            for name, value in stage.submod.state_dict(keep_vars=True).items():
                found[name] = whole(value)
            for parameter, slots in self.optimizer.state.items():
                if id(parameter) in names:
                    for slot, value in slots.items():
                        found[f"{names[id(parameter)]}:{slot}"] = whole(value)
        return found


def whole(value: Tensor) -> Tensor:
    value = value.detach()
    if value.device.type != "xla":
        return value.clone()
    xla_compat.materialize([value])
    return value.cpu()


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The results of a rank at the end: losses, and values by name."""

    losses: list[float]
    loaded: dict[str, Tensor]
    values: dict[str, Tensor]
    rate: float
    note: int


def train(
    layout: Layout,
    num_steps: int,
    source: str = "",
    target: str = "",
    is_async: bool = False,
) -> Trained:
    """Train for some steps, from a checkpoint if there is one, and save the end."""
    dist.init_process_group("xla_pp")
    run = Run(layout, seed=7 if source else 0)
    if source:
        xpp.checkpoint.load(run.state, source)
    loaded = run.values() if source else {}
    losses = [run.mean(run.step()) for _ in range(num_steps)]
    if target:
        run.extra["note"] = 5
        if is_async:
            xpp.checkpoint.async_save(run.state, target).result()
        else:
            xpp.checkpoint.save(run.state, target)
    trained = Trained(
        losses=losses,
        loaded=loaded,
        values=run.values(),
        rate=run.optimizer.param_groups[0]["lr"],
        note=run.extra["note"],
    )
    dist.destroy_process_group()
    return trained
