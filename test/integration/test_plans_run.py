"""Plans run: a model that is split and scheduled by one trains as it does unsplit."""

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_xla
from integration.training import COUNTERS
from joining import join
from planned_models import ROWS, batch_of, deferred_model_of, model_of
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch_xla.debug import metrics

import torch_xla_pp as xpp
from torch_xla_pp.errors import PipelineError, PlanError
from torch_xla_pp.planner import DeviceSpec, PipelinePlan
from torch_xla_pp.testing import Worlds
from torch_xla_pp.torch_compat import order_of

pytestmark = pytest.mark.worlds

MICROBATCHES = 4
# A norm takes this bias away: its gradient is but the rounding of larger values.
ROUNDING = ("skips", "layers.1.bias")
# Gradients of biases of keys, and of those before a norm of the batch, are zero but for
# rounding, which AdamW must not make larger.
OPTIONS: dict[str, Any] = {"lr": 1e-3, "eps": 1e-3}
# So slow that small models are worth a cut.
DEVICE = dataclasses.replace(
    DeviceSpec.named("cpu"), name="slow", flops_per_s=1e7, bytes_per_s=1e7
)
QUICK = dataclasses.replace(
    DEVICE, name="quick", action_s=1e-7, link_latency_s=1e-7, link_bytes_per_s=1e12
)
FAST = dataclasses.replace(QUICK, name="fast", flops_per_s=5e7, bytes_per_s=5e7)
RULES = xpp.AxisRules(
    parameters={
        "*.qkv.weight": ("heads", "embed"),
        "*.qkv.bias": ("heads",),
        "*.out.weight": ("embed", "heads"),
        "*.up.weight": ("mlp", "embed"),
        "*.up.bias": ("mlp",),
        "*.down.weight": ("embed", "mlp"),
        "embed.weight": (None, "embed"),
        "head.weight": (None, "embed"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and what its plan is bound to.

    Args:
        model: The model.
        order: Name of the order of actions.
        options: Further options of `make_plan`.
        schedule: Name of the class that runs the order.
        is_deferred: Whether the model is made under `deferred_init`.
    """

    model: str
    order: str
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule: str
    is_deferred: bool = False

    @property
    def replicas(self) -> int:
        return int(self.options.get("replicas", (1,))[0])


ONE_DEVICE = [
    Case(model="tied", order="zb1p", schedule="ScheduleFromTable"),
    Case(model="skips", order="zbv", schedule="ScheduleZBVZeroBubble"),
    Case(
        model="branches",
        order="dag",
        schedule="ScheduleFromTable",
        options={"device": "cpu"},
    ),
    Case(
        model="block",
        order="interleaved",
        schedule="ScheduleInterleaved1F1B",
        is_deferred=True,
    ),
    # Two stages on a rank, of any place, whose backwards are split.
    Case(
        model="tied",
        order="list",
        schedule="ScheduleFromTable",
        options={"device": QUICK},
    ),
]
REPLICAS = [
    Case(
        model="tied",
        order="1f1b",
        schedule="Schedule1F1B",
        options={"ranks": 4, "replicas": (2,)},
    )
]
PAIRS = {"devices_per_rank": 2}
TWO_DEVICES = [
    Case(
        model="block",
        order="1f1b",
        schedule="Schedule1F1B",
        options=PAIRS | {"sharding": ("fsdp",), "remat": ("full",)},
    ),
    Case(
        model="block",
        order="gpipe",
        schedule="ScheduleGPipe",
        options=PAIRS | {"sharding": ("tp",), "rules": RULES},
    ),
]
UNLIKE = [
    Case(
        model="block",
        order="1f1b",
        schedule="Schedule1F1B",
        options={"devices_per_rank": (1, 2), "device": QUICK, "sharding": ("tp",)},
    ),
    # The second rank has the first stage, so that its order is written out.
    Case(
        model="block",
        order="list",
        schedule="ScheduleFromTable",
        options={
            "devices_per_rank": (1, 2),
            "device": (QUICK, FAST),
            "rank_sharding": ("1x1", "fsdp:2x1"),
            "rules": RULES,
            "stages": (("embed", "blocks"), ("head",)),
            "schedules": ("1f1b",),
        },
    ),
]


def plan_for(case: Case, model: nn.Module) -> PipelinePlan:
    work = xpp.trace_work(model, batch_of(case.model), max_stages=32)
    options: dict[str, Any] = {
        "ranks": 2,
        "device": DEVICE,
        "replicas": (1,),
        "microbatches": (MICROBATCHES,),
        "schedules": (case.order,),
        **case.options,
    }
    plan = xpp.make_plan(work, rows=case.replicas * MICROBATCHES * ROWS, **options)
    assert PipelinePlan.from_json(plan.to_json()) == plan
    return plan


def loss_of(output: Any, target: Tensor) -> Tensor:
    """Return a loss of all that a model returns."""
    found = [x.square().mean() for x in pytree.tree_leaves(output)]
    return sum(found, target.mean())


def train_all(cases: list[Case]) -> list[tuple[PipelinePlan, str, dict[str, int]]]:
    """Train one after the other; return plan, schedule, and what was compiled late."""
    join()
    return [Trained(case).run() for case in cases]


class Trained:
    """A planned model that is trained, and the unsplit one beside it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        if case.is_deferred:
            model = deferred_model_of(case.model)
            self.unsplit = xpp.materialize(deferred_model_of(case.model))
        else:
            model = model_of(case.model)
            self.unsplit = copy.deepcopy(model)
        self.plan = plan_for(case, model)
        self.mesh = xpp.init_device_mesh("xla", plan=self.plan)
        pipe = xpp.pipeline(model, batch_of(case.model), plan=self.plan)
        splits = any({"fsdp", "tp"} & {*rank.rules} for rank in self.plan.ranks)
        # Rules that a plan was made with are in it.
        sharding = RULES if splits and self.plan.rules is None else None
        self.stages = pipe.build_stages(self.mesh, sharding=sharding)
        self.schedule = pipe.make_schedule(self.stages, loss_fn=loss_of)
        assert order_of(self.schedule) == self.plan.table()

    def run(self) -> tuple[PipelinePlan, str, dict[str, int]]:
        """Train two steps and compare everything after each."""
        own = [p for stage in self.stages for p in stage.submod.parameters()]
        optimizers = [
            torch.optim.AdamW(parameters, **OPTIONS)
            for parameters in (own, self.unsplit.parameters())
        ]
        late: dict[str, int] = {}
        for step in range(2):
            late = self._step(step)
            for optimizer in optimizers:
                optimizer.step()
            for name, parameter in self._named():
                expected = self.unsplit.get_parameter(name)
                check(f"{name} after step {step}", parameter, expected)
            for optimizer in optimizers:
                optimizer.zero_grad()
            # The optimizer's own program is not the schedule's.
            torch_xla.sync()
        return self.plan, type(self.schedule).__name__, late

    def _step(self, step: int) -> dict[str, int]:
        """Compare a step, and return what it compiled."""
        replicas = self.case.replicas
        rows = MICROBATCHES * ROWS
        replica = self.mesh.get_local_rank("dp") if replicas > 1 else 0
        args = batch_of(self.case.model, replicas * rows, seed=step)
        target = torch.randn(replicas * rows, generator=torch.manual_seed(step))
        own = slice(replica * rows, (replica + 1) * rows)
        losses: list[Tensor] = []
        is_last = any(stage.is_last for stage in self.stages)
        is_first = any(stage.is_first for stage in self.stages)
        kwargs = {"target": target[own], "losses": losses} if is_last else {}
        given = tuple(x[own] for x in args) if is_first else ()
        before = counters()
        output = self.schedule.step(*given, **kwargs)
        compiled = {name: n - before[name] for name, n in counters().items()}
        outputs, expected = train_unsplit(self.unsplit, args, target)
        if is_last:
            first = replica * MICROBATCHES
            number = slice(first, first + MICROBATCHES)
            whole = pytree.tree_map(lambda *x: torch.cat(x), *outputs[number])
            check("outputs", output, whole)
            check("losses", losses, expected[number])
        for name, parameter in self._named():
            least = 0.5 if (self.case.model, name) == ROUNDING else 0.1
            check(name, parameter.grad, self.unsplit.get_parameter(name).grad, least)
        return compiled

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [pair for s in self.stages for pair in s.submod.named_parameters()]


def train_unsplit(
    model: nn.Module, args: tuple[Tensor, ...], target: Tensor
) -> tuple[list[Any], list[Tensor]]:
    """Add up the mean of all microbatches' gradients; return outputs and losses."""
    outputs, losses = [], []
    count = len(target) // ROWS
    for i in range(count):
        rows = slice(i * ROWS, (i + 1) * ROWS)
        outputs.append(model(*(x[rows] for x in args)))
        losses.append(loss_of(outputs[-1], target[rows]))
        (losses[-1] / count).backward()
    return outputs, losses


def counters() -> dict[str, int]:
    return {name: metrics.counter_value(name) or 0 for name in COUNTERS}


def check(what: str, got: Any, expected: Any, least: float = 0.1) -> None:
    """Compare up to rounding, that of values of at least some size."""
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True)
    for one, other in pairs:
        one, other = one.detach().cpu(), other.detach()
        scale = other.abs().max().clamp_min(least)
        assert (one - other).abs().max() < 2e-5 * scale, what


def trained(
    worlds: Worlds, cases: list[Case], *, ranks: int = 2, devices: Any = 1
) -> list[PipelinePlan]:
    """Train on every rank; return the plans."""
    by_rank = worlds.run(train_all, ranks=ranks, devices=devices, args=(cases,))
    for found in by_rank:
        for case, (plan, name, late) in zip(cases, found, strict=True):
            assert name == case.schedule
            assert plan.schedule.name == case.order
            assert late == dict.fromkeys(COUNTERS, 0), case
    plans = [[plan for plan, _, _ in found] for found in by_rank]
    assert all(found == plans[0] for found in plans)
    return plans[0]


def cut_modules(plan: PipelinePlan) -> set[str]:
    """Return the paths of modules that several stages have parts of."""
    paths = [path for stage in plan.stages for path in stage.modules]
    return {path for path in paths if paths.count(path) > 1}


def test_plans_train_as_the_unsplit_model(worlds: Worlds) -> None:
    tied, skips, branches, deferred, listed = trained(worlds, ONE_DEVICE)
    assert tied.model.tied == ("embed.weight",)
    assert [stage.rank for stage in skips.stages] == [0, 1, 1, 0]
    assert [stage.inputs[0] for stage in branches.stages] == ["x", "y"]
    assert cut_modules(deferred) == {"blocks.0"}
    assert [stage.rank for stage in listed.stages] == [0, 1, 0, 1]
    assert {a.kind for row in listed.table().actions for a in row} == {*"FIW"}


def test_replicas_of_a_plan_train_as_the_unsplit_model(worlds: Worlds) -> None:
    (plan,) = trained(worlds, REPLICAS, ranks=4)
    assert plan.batch.replicas == 2


def test_plans_of_sharded_stages_train_as_the_unsplit_model(worlds: Worlds) -> None:
    plans = trained(worlds, TWO_DEVICES, devices=2)
    assert plans[0].stages[0].remat == "full"
    found = [[rank.rules for rank in plan.ranks] for plan in plans]
    assert found == [[("fsdp",)] * 2, [("tp",)] * 2]


def test_ranks_of_other_devices_train_as_the_unsplit_model(worlds: Worlds) -> None:
    plans = trained(worlds, UNLIKE, devices=(1, 2))
    found = [[(rank.devices, rank.rules) for rank in plan.ranks] for plan in plans]
    assert found == [[(1, ()), (2, ("tp",))], [(1, ()), (2, ("fsdp",))]]
    assert [[stage.rank for stage in plan.stages] for plan in plans] == [[0, 1], [1, 0]]


def split_by_other_plans() -> str:
    """Run stages of another plan on each rank; return what is said of it.

    A plan of another model is refused before.
    """
    join()
    case = ONE_DEVICE[2]
    model = model_of(case.model)
    plan = plan_for(case, model)
    mesh = xpp.init_device_mesh("xla", plan=plan)
    other_model = model_of(case.model)
    other_model.left[1] = nn.Tanh()
    with pytest.raises(PlanError, match="differ: tanh"):
        xpp.pipeline(other_model, batch_of(case.model), plan=plan)
    warnings = (f"a plan of rank {dist.get_rank()}",)
    costs = dataclasses.replace(plan.costs, warnings=warnings)
    other = dataclasses.replace(plan, costs=costs)
    pipe = xpp.pipeline(model, batch_of(case.model), plan=other)
    stages = pipe.build_stages(mesh)
    schedule = pipe.make_schedule(stages, loss_fn=loss_of)
    args = batch_of(case.model, MICROBATCHES * ROWS)
    target = torch.zeros(MICROBATCHES * ROWS)
    try:
        schedule.step(*(args if stages[0].is_first else ()), target=target)
    except PipelineError as error:
        return str(error)
    return "none"


def test_other_plans_and_models_are_refused_on_all_ranks(worlds: Worlds) -> None:
    found = worlds.run(split_by_other_plans, ranks=2)
    assert all("plan: expected the same on every rank, got [" in x for x in found)
