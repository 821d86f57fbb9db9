"""Plans run: a model that is split and scheduled by one trains as it does unsplit."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from joining import join
from planned_models import ROWS, batch_of, model_of, plan_of
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleZBVZeroBubble
from torch.utils import _pytree as pytree

import torch_xla_pp as xpp
from torch_xla_pp.planner import PipelinePlan
from torch_xla_pp.testing import Worlds
from torch_xla_pp.torch_compat import order_of
from torch_xla_pp.tracing import trace_work

pytestmark = pytest.mark.worlds

MICROBATCHES = 4
# The gradient of a bias of keys is zero but for rounding, which AdamW divides by the
# like unless `eps` is larger.
OPTIONS: dict[str, Any] = {"lr": 1e-3, "eps": 1e-4}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and after how many of its works to cut it; all else of its plan."""

    model: str
    cuts: tuple[int, ...]
    placement: tuple[int, ...] = (0, 1)
    schedule: str = "1f1b"
    kind: type = Schedule1F1B
    remat: str = "none"
    devices: int = 1

    def __str__(self) -> str:
        return f"{self.model} {self.schedule}"


def plan_for(case: Case, model: nn.Module) -> PipelinePlan:
    work = trace_work(model, batch_of(case.model), max_stages=32)
    pairs = zip([0, *case.cuts], [*case.cuts, None], strict=True)
    mesh = {"data": case.devices} if case.devices > 1 else {}
    plan = plan_of(
        work,
        [work.works[low:high] for low, high in pairs],
        placement=case.placement,
        schedule=case.schedule,
        microbatches=MICROBATCHES,
        remat=case.remat,
        mesh=mesh,
        rules=("dp",) if mesh else (),
    )
    assert PipelinePlan.from_json(plan.to_json()) == plan
    return plan


def loss_of(output: Any, target: Tensor) -> Tensor:
    """Return a loss of all that a model returns."""
    found = [x.square().mean() for x in pytree.tree_leaves(output)]
    return sum(found, target.mean())


def train(case: Case) -> str:
    """Train one step; return the name of the schedule's class."""
    join()
    model = model_of(case.model)
    unsplit = copy.deepcopy(model)
    plan = plan_for(case, model)
    mesh = xpp.init_device_mesh("xla", plan=plan)
    pipe = xpp.pipeline(model, batch_of(case.model), plan=plan)
    stages = pipe.build_stages(mesh)
    schedule = pipe.make_schedule(stages, loss_fn=loss_of)
    assert order_of(schedule) == plan.table()
    parts = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parts, **OPTIONS)
    args = batch_of(case.model, MICROBATCHES * ROWS)
    target = torch.randn(MICROBATCHES * ROWS)
    losses: list[Tensor] = []
    is_last = any(stage.is_last for stage in stages)
    kwargs: dict[str, Any] = {"target": target, "losses": losses} if is_last else {}
    is_first = any(stage.is_first for stage in stages)
    output = schedule.step(*(args if is_first else ()), **kwargs)
    grads = {
        name: (stage, parameter.grad)
        for stage in stages
        for name, parameter in stage.submod.named_parameters()
    }
    expected = train_unsplit(unsplit, args, target)
    if is_last:
        check("outputs", output, expected["outputs"])
        check("losses", losses, expected["losses"])
    named = dict(unsplit.named_parameters(remove_duplicate=False))
    for name, (_, grad) in grads.items():
        check(name, grad, named[name].grad)
    optimizer.step()
    torch.optim.AdamW(unsplit.parameters(), **OPTIONS).step()
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            check(name, parameter, named[name])
    return type(schedule).__name__


def train_unsplit(
    model: nn.Module, args: tuple[Tensor, ...], target: Tensor
) -> dict[str, Any]:
    outputs, losses = [], []
    for i in range(MICROBATCHES):
        rows = slice(i * ROWS, (i + 1) * ROWS)
        outputs.append(model(*(x[rows] for x in args)))
        losses.append(loss_of(outputs[-1], target[rows]))
        (losses[-1] / MICROBATCHES).backward()
    whole = pytree.tree_map(lambda *parts: torch.cat(parts), *outputs)
    return {"outputs": whole, "losses": losses}


def check(what: str, got: Any, expected: Any) -> None:
    """Compare up to rounding, also where gradients are nothing but that."""
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True)
    for one, other in pairs:
        one, other = one.detach().cpu(), other.detach()
        scale = other.abs().max().clamp_min(1e-1)
        assert (one - other).abs().max() < 2e-5 * scale, what


@pytest.mark.parametrize(
    "case",
    [
        Case(model="gpt", cuts=(5,), devices=2, remat="full"),
        Case(model="tied", cuts=(3,), schedule="zb1p", kind=xpp.ScheduleFromTable),
        Case(
            model="skips",
            cuts=(2, 4, 6),
            placement=(0, 1, 1, 0),
            schedule="zbv",
            kind=ScheduleZBVZeroBubble,
        ),
        Case(model="branches", cuts=(2,), schedule="dag", kind=xpp.ScheduleFromTable),
    ],
    ids=str,
)
def test_a_plan_trains_as_the_unsplit_model(worlds: Worlds, case: Case) -> None:
    found = worlds.run(train, ranks=2, devices=case.devices, args=(case,))
    assert found == [case.kind.__name__] * 2
