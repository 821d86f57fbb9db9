"""What upstream's test_schedule asserts of schedules that run, on one rank."""

import pytest
import torch
from torch import Tensor
from torch._dynamo import OptimizedModule
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds
from upstream.jobs import (
    GRADS,
    LOOPED,
    SINGLE,
    Stack,
    build,
    feed,
    make_schedule,
    nothing_leaks,
    outcomes,
    summed_loss,
    train,
    train_unsplit,
)

pytestmark = pytest.mark.worlds


def runs_a_single_stage(name: str) -> None:
    model = Stack(1)
    expected = train_unsplit(model, F.cross_entropy)
    stages = build(model, [0])
    schedule = make_schedule(name, stages, 2, loss_fn=F.cross_entropy)
    output, losses = train(schedule, stages, expected)
    torch.testing.assert_close(output.cpu(), expected.output)
    torch.testing.assert_close(torch.stack(losses).mean().cpu(), expected.loss)
    expected.check_grads(stages, **GRADS)


def evaluates_then_trains(name: str) -> None:
    model = Stack(1)
    batch = train_unsplit(model, F.cross_entropy)
    stages = build(model, [0])
    schedule = make_schedule(name, stages, 2, loss_fn=F.cross_entropy)
    for call in (schedule.eval, schedule.eval, schedule.step, schedule.step):
        losses: list[Tensor] = []
        feed(call, stages, batch.x, batch.target, losses)
        assert len(losses) == 2


def refuses_a_compiled_module() -> None:
    module = torch.compile(Stack(1))
    assert isinstance(module, OptimizedModule)
    stage = xpp.PipelineStage(module, 0, 1, xpp.device())
    with pytest.raises(RuntimeError, match="torch.compile"):
        ScheduleInterleavedZeroBubble([stage], 2)


def runs_an_order(num_layers: int, order: str) -> None:
    """Run actions as they are written, on stages that are all of this rank."""
    model = Stack(num_layers)
    expected = train_unsplit(model)
    stages = build(model, range(num_layers))
    schedule = _PipelineScheduleRuntime(
        stages, 2, loss_fn=summed_loss, scale_grads=False
    )
    actions = [_Action.from_str(text) for text in order.split()]
    schedule._prepare_schedule_with_comms({0: actions}, format="compute_comms")
    with nothing_leaks():
        output, losses = train(schedule, stages, expected)
    expected.check_result(output, losses)
    expected.check_grads(stages, **GRADS)


CASES = {
    **{f"single_stage-{n}": (runs_a_single_stage, (n,)) for n in (*SINGLE, *LOOPED)},
    **{f"eval_then_train-{n}": (evaluates_then_trains, (n,)) for n in SINGLE + LOOPED},
    "compile-InterleavedZeroBubble": (refuses_a_compiled_module, ()),
    "v_schedule": (runs_an_order, (2, "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1")),
    "split_b_w": (runs_an_order, (1, "0F0 0F1 0I0 0I1 0W0 0W1")),
}


@pytest.fixture(scope="module")
def found(worlds: Worlds) -> dict[str, list[str]]:
    return outcomes(worlds, CASES, ranks=1)


@pytest.mark.parametrize("case", CASES)
def test_it_holds_on_one_rank(found: dict[str, list[str]], case: str) -> None:
    assert found[case] == []
