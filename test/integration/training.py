"""Train a small model as a pipeline and unsplit, and compare everything.

`train` runs in every rank of a world; each rank also trains the unsplit model, so
that it can compare its own stages.
"""

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.spmd as xs
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.schedule import Schedule

SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
COUNTERS = ("UncachedCompile", "CreateCompileHandles", "ReplicateShardedData")
VOCAB = 13
LEARNING_RATE = 1e-3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tokens in, logits out; as many blocks as there are stages."""

    def __init__(self, num_blocks: int, width: int = 8, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, VOCAB)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Part(nn.Module):
    """One stage of `Model`, cut out by hand, with the model's parameter names."""

    def __init__(self, model: Model, stage: int) -> None:
        super().__init__()
        if stage == 0:
            self.embed = model.embed
        self.blocks = nn.ModuleDict({str(stage): model.blocks[stage]})
        if stage == len(model.blocks) - 1:
            self.head = model.head

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "embed"):
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if hasattr(self, "head") else x


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True, kw_only=True)
class Side:
    """The layout of values on one rank, if ranks differ: its mesh and its sharding."""

    axes: tuple[str, ...] = ("data",)
    sizes: tuple[int, ...]
    sharding: Any = None

    def get_local_rank(self, _: str) -> int:
        return dist.get_rank()

    def get_group(self, _: str) -> dist.ProcessGroup | None:
        return None

    def __getitem__(self, _: tuple[str, ...]) -> Any:
        count = math.prod(self.sizes)
        return xs.Mesh(np.arange(count), self.sizes, self.axes)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, and how; `table` takes the place of `schedule`.

    `rows` and `ranks` are those of one replica.
    """

    schedule: str = "1F1B"
    frontend: str = "traced"
    ranks: int = 2
    replicas: int = 1
    devices: int = 1
    num_microbatches: int = 4
    rows: int = 8
    length: int = 3
    width: int = 8
    num_steps: int = 3
    dtype: torch.dtype = torch.float32
    init_device: str = "cpu"
    inputs_on_device: bool = True
    eval_first: bool = True
    evaluates: bool = True
    takes_outputs: bool = True
    scale_grads: bool = True
    sharding: Any = None
    axes: tuple[str, ...] = ("data",)
    axis_sizes: tuple[int, ...] | None = None
    transport: str = ""
    remat: str = "none"
    is_tied: bool = False
    max_norm: float | None = None
    table: str = ""
    # One per rank; more than there are ranks: one per stage.
    sides: tuple[Side, ...] = ()

    @property
    def order(self) -> Schedule:
        return Schedule.from_csv(self.table)

    @property
    def num_stages(self) -> int:
        if self.table:
            return self.order.num_stages
        return self.ranks if self.schedule in SINGLE else 2 * self.ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        if self.table:
            return self.order.stages_of(rank)
        if self.schedule in SINGLE:
            return (rank,)
        if self.schedule in LOOPED:
            return (rank, rank + self.ranks)
        return (rank, self.num_stages - 1 - rank)


@dataclass
class Report:
    """Relative errors by what was compared, and counters of the last steps."""

    errors: dict[str, float] = field(default_factory=dict)
    compiled: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    parameter_difference: float = 0.0
    tied: list[Tensor] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    explanation: Any = None
    programs: set[str] = field(default_factory=set)
    bundles: set[str] = field(default_factory=set)

    def compare(self, what: str, got: Tensor, expected: Tensor) -> None:
        """Keep the largest difference, relative to the largest value."""
        got, expected = got.detach().float().cpu(), expected.detach().float()
        difference = float((got - expected).abs().max())
        error = difference / float(expected.abs().max())
        if what == "parameters":
            self.parameter_difference = max(self.parameter_difference, difference)
        self.errors[what] = max(self.errors.get(what, 0.0), error)


def build(job: Job, model: Model, mesh: Any) -> list[Any]:
    """Make this rank's stages."""
    rank = mesh.get_local_rank("pp")
    # Ops do not travel between processes.
    remat = [torch.ops.aten.mm.default] if job.remat == "all but mm" else job.remat
    group = mesh.get_group("pp")
    more = {"replicas": mesh.get_group("dp")} if job.replicas > 1 else {}

    def options(stage: int) -> dict[str, Any]:
        side = job.sides[stage % len(job.sides)] if job.sides else job
        own = side if job.sides else mesh
        found = {"mesh": own[job.axes], "sharding": side.sharding, "remat": remat}
        return found | more

    if job.frontend == "manual":
        return [
            xpp.PipelineStage(
                Part(model, stage),
                stage,
                job.num_stages,
                xpp.device(),
                group=group,
                tied=tied_names(job, stage),
                **options(stage),
            )
            for stage in job.stages_of(rank)
        ]
    spec = {f"blocks.{i}": SplitPoint.BEGINNING for i in range(1, job.num_stages)}
    example = torch.zeros(
        job.rows // job.num_microbatches,
        job.length,
        dtype=torch.long,
        device="meta" if job.init_device == "meta" else "cpu",
    )
    sharding = options(job.stages_of(rank)[0])["sharding"]
    activations = sharding.activations if isinstance(sharding, xpp.AxisRules) else {}
    pipe = xpp.pipeline(
        model, mb_args=(example,), split_spec=spec, activations=activations
    )
    return [
        pipe.build_stage(stage, xpp.device(), group, **options(stage))
        for stage in job.stages_of(rank)
    ]


def tied_names(job: Job, stage: int) -> dict[str, str]:
    if not job.is_tied:
        return {}
    names = {0: "embed.weight", job.num_stages - 1: "head.weight"}
    return {names[stage]: "embedding"} if stage in names else {}


def start(job: Job) -> tuple[list[Any], Any]:
    """Join the job; return this rank's stages of a seeded model, and the schedule."""
    join(job.transport)
    torch.manual_seed(0)
    model = Model(job.num_stages, job.width, is_tied=job.is_tied)
    stages = build(job, model, mesh_of(job))
    return stages, make_schedule(job, stages)


def make_schedule(job: Job, stages: list[Any]) -> Any:
    """Make torch's schedule, unmodified, or one from a table."""
    if job.table:
        return xpp.ScheduleFromTable(
            stages, job.table, loss_fn, scale_grads=job.scale_grads
        )
    cls = get_schedule_class(job.schedule)
    first = stages[0] if job.schedule in SINGLE else stages
    return cls(
        first, job.num_microbatches, loss_fn=loss_fn, scale_grads=job.scale_grads
    )


def run_step(job: Job, schedule: Any, stages: list[Any], x: Tensor, y: Tensor) -> Any:
    """Call `step` as a training script does."""
    if job.takes_outputs:
        return _call(job, schedule.step, stages, x, y)

    def step(*args: Any, **kwargs: Any) -> None:
        schedule.step(*args, **kwargs)

    return _call(job, step, stages, x, y)


def _call(job: Job, call: Any, stages: list[Any], x: Tensor, y: Tensor) -> Any:
    if job.inputs_on_device:
        x = x.to(xpp.device())
    args = (x,) if stages[0].is_first else ()
    losses: list[Tensor] = []
    kwargs: dict[str, Any] = {}
    if any(stage.is_last for stage in stages):
        kwargs = {"target": y.to(xpp.device()), "losses": losses}
    output = call(*args, **kwargs)
    return output, losses


def batch(job: Job, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (2, job.replicas * job.rows, job.length)
    x, y = torch.randint(0, VOCAB, shape, generator=generator)
    return x, y


def mesh_of(job: Job) -> Any:
    if job.sides:
        xpp.device()
        return job.sides[dist.get_rank()]
    sizes, names = job.axis_sizes or (job.devices,), ("pp", *job.axes)
    shape = (job.ranks, *sizes)
    if job.replicas > 1:
        shape, names = (job.replicas, *shape), ("dp", *names)
    return xpp.init_device_mesh("xla", shape, mesh_dim_names=names)


def train(job: Job) -> Report:
    """Train for some steps and compare with the unsplit model after each."""
    join(job.transport)
    return train_joined(job)


def train_joined(job: Job) -> Report:
    """Do as `train` in a job that this rank has joined."""
    mesh = mesh_of(job)
    replica = mesh.get_local_rank("dp") if job.replicas > 1 else 0
    torch.manual_seed(0)
    if job.init_device == "deferred":
        reference, model = xpp.materialize(deferred(job)), deferred(job)
    else:
        reference = Model(job.num_stages, job.width, is_tied=job.is_tied).to(job.dtype)
        model = copy.deepcopy(reference)
    if job.init_device == "meta":
        state = model.state_dict()
        model = model.to("meta")
    stages = build(job, model, mesh)
    if job.init_device == "meta":
        for stage in stages:
            stage.submod.load_state_dict(
                {k: v for k, v in state.items() if k in stage.submod.state_dict()}
            )
    schedule = make_schedule(job, stages)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    expected_optimizer = torch.optim.AdamW(reference.parameters(), lr=LEARNING_RATE)
    report = Report()
    if job.eval_first and job.evaluates:
        _evaluate(job, schedule, stages, reference, report)
    for step in range(job.num_steps):
        x, y = batch(job, step)
        before = _counters()
        own_x, own_y = (v.chunk(job.replicas)[replica] for v in (x, y))
        output, losses = run_step(job, schedule, stages, own_x, own_y)
        if step > 0:
            after = _counters()
            for name in COUNTERS:
                grown = after[name] - before[name]
                report.compiled[name] = report.compiled.get(name, 0) + grown
        _expected_step(job, replica, reference, x, y, losses, output, report)
        _compare_grads(stages, reference, report)
        if job.max_norm is not None:
            _clip(job.max_norm, stages, reference, report)
        if step == 0 and job.evaluates:
            _evaluate(job, schedule, stages, reference, report)
            _compare_grads(stages, reference, report)
        optimizer.step()
        expected_optimizer.step()
        optimizer.zero_grad()
        expected_optimizer.zero_grad()
        # The optimizer's own program is not the schedule's.
        torch_xla.sync()
        named = dict(reference.named_parameters(remove_duplicate=False))
        for stage in stages:
            for name, parameter in stage.submod.named_parameters():
                report.compare("parameters", parameter, named[name])
    report.explanation = stages[0].explain()
    last = [stage.explain() for stage in stages if stage.is_last]
    report.programs = {p.name for found in last for p in found.programs}
    report.bundles = {
        bundle.name
        for stage in stages
        for own in stage.model.sums._programs.values()
        for bundle in own.summed.bundles
    }
    report.tied = [
        stage.submod.get_parameter(name).detach().cpu()
        for stage in stages
        for name in tied_names(job, stage.stage_index)
    ]
    report.values = {
        name: parameter.detach().cpu()
        for stage in stages
        for name, parameter in stage.submod.named_parameters()
    }
    return report


def deferred(job: Job) -> Model:
    with xpp.deferred_init():
        return Model(job.num_stages, job.width, is_tied=job.is_tied).to(job.dtype)


def _clip(max_norm: float, stages: list[Any], reference: Model, report: Report) -> None:
    norm = xpp.clip_grad_norm_(stages, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
    report.compare("norm", norm, expected)
    _compare_grads(stages, reference, report)


def _counters() -> dict[str, int]:
    return {name: metrics.counter_value(name) or 0 for name in COUNTERS}


def _expected_step(
    job: Job,
    replica: int,
    reference: Model,
    x: Tensor,
    y: Tensor,
    losses: list[Tensor],
    output: Tensor | None,
    report: Report,
) -> None:
    outputs = []
    count = job.num_microbatches
    own = range(replica * count, (replica + 1) * count)
    chunks = zip(
        x.chunk(job.replicas * count), y.chunk(job.replicas * count), strict=True
    )
    for i, (mb_x, mb_y) in enumerate(chunks):
        predicted = reference(mb_x)
        loss = loss_fn(predicted, mb_y)
        (loss / job.replicas / (count if job.scale_grads else 1)).backward()
        outputs += [predicted] if i in own else []
        if losses and i in own:
            report.compare("losses", losses[i - own.start], loss)
    if output is not None:
        report.compare("outputs", output, torch.cat(outputs))


def _compare_grads(stages: list[Any], reference: Model, report: Report) -> None:
    named = dict(reference.named_parameters(remove_duplicate=False))
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            expected = named[name].grad
            if parameter.grad is None or expected is None:
                report.missing.append(f"{name}: {parameter.grad} vs {expected}")
            else:
                report.compare("gradients", parameter.grad, expected)


def _evaluate(
    job: Job, schedule: Any, stages: list[Any], reference: Model, report: Report
) -> None:
    """Compare what `eval` gives; gradients must not change."""
    x, y = (value[: job.rows] for value in batch(job, 77))
    output, losses = _call(job, schedule.eval, stages, x, y)
    with torch.no_grad():
        expected = reference(x)
    if output is not None:
        report.compare("eval outputs", output, expected)
        mean = torch.stack([loss.detach().cpu() for loss in losses]).mean()
        report.compare("eval losses", mean, loss_fn(expected, y))
        if output.requires_grad:
            report.missing.append("eval output requires grad")
