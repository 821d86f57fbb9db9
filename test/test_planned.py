"""What does not fit a plan is refused in words."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planned_models import GPT, ROWS, Branches, batch_of, model_of, plan_of
from torch import Tensor
from torch.distributed.pipelining import SplitPoint

import torch_xla_pp as xpp
from torch_xla_pp.errors import PlanError
from torch_xla_pp.mesh import AxisRules
from torch_xla_pp.planned import planned_rules
from torch_xla_pp.planner import PipelinePlan
from torch_xla_pp.tracing import trace_work

pytestmark = pytest.mark.xla


@pytest.fixture(scope="module")
def plan() -> PipelinePlan:
    work = trace_work(model_of("branches"), batch_of("branches"))
    return plan_of(work, [work.works[:2], work.works[2:]])


def split(plan: PipelinePlan, **changes: Any) -> xpp.Pipe:
    given = {"module": model_of("branches"), "mb_args": batch_of("branches")}
    return xpp.pipeline(**given | {"plan": plan} | changes)


def test_an_example_of_other_rows_is_refused(plan: PipelinePlan) -> None:
    with pytest.raises(ValueError, match="of 4 rows: .*Pass plan.example"):
        split(plan, mb_args=batch_of("branches", ROWS + 1))


@pytest.mark.parametrize("rows", [1, ROWS + 3])
def test_the_plans_example_of_it_has_the_planned_rows(
    plan: PipelinePlan, rows: int
) -> None:
    pipe = split(plan, mb_args=plan.example(batch_of("branches", rows)))
    assert pipe.num_stages == 2


def test_a_model_of_other_operations_is_refused(plan: PipelinePlan) -> None:
    with pytest.raises(PlanError, match="which the plan has not; no relu, which the"):
        split(plan, module=GPT(1), mb_args=batch_of("gpt"))


def test_the_first_operation_that_is_another_is_named(plan: PipelinePlan) -> None:
    changed = model_of("branches")
    changed.left[1] = torch.nn.Tanh()
    text = (
        r"differ: tanh \(File .*, which the plan has not; no relu_1, which the plan has"
    )
    with pytest.raises(PlanError, match=text):
        split(plan, module=changed)
    wider = model_of("branches")
    wider.head = torch.nn.Linear(16, 5)
    text = (
        r"expected the 9 operations that were planned, got 9; the first that differ: "
        r"linear_4 \(File .*planned_models.py.*in forward\), here aten.linear.default"
        r"\(cat, head.weight float32\[5, 16\], head.bias float32\[5\]\) -> float32 "
        r"of 2 dimensions, planned is another\. Pass the model that was planned"
    )
    with pytest.raises(PlanError, match=text):
        split(plan, module=wider)


def test_other_outputs_are_refused(plan: PipelinePlan) -> None:
    class Turned(Branches):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x, y)[::-1]

    with pytest.raises(PlanError, match=r"differ: output, here output\(mean, linear_4"):
        split(plan, module=Turned())


def test_weights_that_are_not_tied_as_planned_are_refused() -> None:
    args = batch_of("tied")
    work = trace_work(model_of("tied"), args)
    plan = plan_of(work, [work.works[:2], work.works[2:]])
    untied = model_of("tied")
    untied.head.weight = torch.nn.Parameter(untied.head.weight.detach().clone())
    with pytest.raises(PlanError, match=r"expected 4020 bytes of parameters, got 4436"):
        xpp.pipeline(untied, args, plan=plan)


def test_a_plan_and_split_points_are_too_much(plan: PipelinePlan) -> None:
    spec = {"head": SplitPoint.BEGINNING}
    with pytest.raises(ValueError, match="got split_spec and plan. Leave the others"):
        split(plan, split_spec=spec)


def test_stages_and_schedules_of_a_plan_need_one() -> None:
    spec = {"head": SplitPoint.BEGINNING}
    pipe = xpp.pipeline(model_of("branches"), batch_of("branches"), split_spec=spec)
    for call in (pipe.build_stages, pipe.make_schedule):
        with pytest.raises(ValueError, match="was split by a plan, got one that was"):
            call(SimpleNamespace())


def test_presets_that_split_parameters_need_patterns(plan: PipelinePlan) -> None:
    rank = dataclasses.replace(plan.ranks[0], rules=("fsdp", "tp"))
    split = dataclasses.replace(plan, ranks=(rank, rank))
    with pytest.raises(ValueError, match="rank 1 of the plan splits .* fsdp and tp"):
        planned_rules(split, 1, None)
    patterns = AxisRules(parameters={"*.weight": ("mlp", "embed")})
    rules = planned_rules(split, 1, patterns)
    assert rules.parameters == patterns.parameters
    assert (rules.axes["batch"], rules.axes["mlp"]) == ("data", "model")
