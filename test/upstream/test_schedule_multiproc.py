"""What upstream's test_schedule_multiproc asserts, on two ranks rather than four."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _PipelineScheduleRuntime,
    _ScheduleForwardOnly,
)
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds
from upstream.jobs import (
    GRADS,
    LOOPED,
    ROWS,
    SINGLE,
    V_SHAPED,
    WIDTH,
    Mlp,
    Shifted,
    Stack,
    build,
    feed,
    make_schedule,
    nothing_leaks,
    outcomes,
    stages_of,
    summed_loss,
    trace,
    train,
    train_unsplit,
)

pytestmark = pytest.mark.worlds

RANKS = 2
SUMMED = {"loss_fn": summed_loss, "scale_grads": False}
Orders = dict[int, str]


def chains_forwards() -> None:
    """The output becomes the next input, 20 times."""
    rank, last, model = dist.get_rank(), RANKS - 1, Stack(RANKS)
    x = torch.randn(ROWS, WIDTH)
    expected, count = x, 2 * RANKS
    x = x.to(xpp.device())
    stage = trace(model, count)
    schedule = _ScheduleForwardOnly(stage, count, scale_grads=False)
    for _ in range(20):
        if rank == 0:
            schedule.step(x)
            dist.recv(x, src=last)
        else:
            output = schedule.step()
            dist.send(output, dst=0)
    if rank == last:
        with torch.no_grad():
            for _ in range(20):
                expected = model.cpu()(expected)
        torch.testing.assert_close(output.cpu(), expected)


def evaluates_without_gradients(name: str) -> None:
    rank = dist.get_rank()
    indices = stages_of(name, rank, RANKS)
    model = Stack(RANKS * len(indices))
    stages = [trace(model, 4)] if name in SINGLE else build(model, indices)
    schedule = make_schedule(name, stages, 4, **SUMMED)
    losses: list[Tensor] = []
    x, target = torch.randn(2, ROWS, WIDTH)
    with torch.set_grad_enabled(rank != 0):
        feed(schedule.eval, stages, x, target, losses)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    assert all(parameter.grad is None for parameter in parameters)
    if rank == RANKS - 1:
        assert losses


def runs_many_steps(name: str) -> None:
    model = Stack(RANKS)
    batch = train_unsplit(model)
    stage = trace(model, 4)
    schedule = make_schedule(name, [stage], 4, **SUMMED)
    train(schedule, [stage], batch, num_steps=20)
    dist.barrier()


def takes_keywords_traced(name: str) -> None:
    model = Shifted()
    y = torch.randn(ROWS, WIDTH)
    expected = train_unsplit(model, y=y)
    stage = trace(model, 4, y=y)
    schedule = make_schedule(name, [stage], 4, **SUMMED)
    output, losses = train(schedule, [stage], expected, 1, y=y)
    if output is not None:
        torch.testing.assert_close(output.cpu(), expected.output, rtol=1e-2, atol=5e-3)
        torch.testing.assert_close(sum(losses).cpu(), expected.loss)


def has_gradients_traced(name: str) -> None:
    model = Stack(RANKS)
    expected = train_unsplit(model)
    stage = trace(model, 2 * RANKS)
    schedule = make_schedule(name, [stage], 2 * RANKS, **SUMMED)
    expected.check_result(*train(schedule, [stage], expected))
    expected.check_grads_by_name(stage)


def has_gradients_manual(name: str, is_inferred: bool) -> None:
    """Shapes are found out, or stated."""
    rank, model, count = dist.get_rank(), Stack(RANKS), 2 * RANKS
    expected = train_unsplit(model)
    layer, examples = model.layers[rank], {}
    if not is_inferred:
        example = expected.x.chunk(count)[0]
        with torch.no_grad():
            examples = {"input_args": (example,), "output_args": layer(example)}
    stage = xpp.PipelineStage(layer, rank, RANKS, xpp.device(), **examples)
    schedule = make_schedule(name, [stage], count, **SUMMED)
    expected.check_result(*train(schedule, [stage], expected))
    expected.check_grads([stage])


def trains_two_stages(name: str, count: int, tolerance: dict[str, float]) -> None:
    indices = stages_of(name, dist.get_rank(), RANKS)
    model = Stack(2 * RANKS)
    expected = train_unsplit(model)
    stages = build(model, indices)
    schedule = make_schedule(name, stages, count, **SUMMED)
    with nothing_leaks():
        output, losses = train(schedule, stages, expected)
    dist.barrier()
    expected.check_result(output, losses)
    expected.check_grads(stages, **tolerance)


class MlpWithKeyword(Mlp):
    def forward(self, x: Tensor, unused: Tensor | None = None) -> Tensor:
        return super().forward(x)


class StackWithKeyword(Stack):
    block = MlpWithKeyword

    def forward(self, x: Tensor, unused: Tensor | None = None) -> Tensor:
        return super().forward(x)


def takes_an_unused_keyword(name: str) -> None:
    indices = stages_of(name, dist.get_rank(), RANKS)
    model, count = StackWithKeyword(2 * RANKS), 2 * RANKS
    expected = train_unsplit(model, unused=torch.ones(1))
    stages = build(model, indices)
    schedule = make_schedule(name, stages, count, **SUMMED)
    unused = torch.ones(1).unsqueeze(0).expand(count, -1)
    expected.check_result(*train(schedule, stages, expected, unused=unused))
    expected.check_grads(stages, rtol=3e-5, atol=5e-3)


class Product(Function):
    """A linear map with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class OwnBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weights = torch.empty(2, WIDTH, WIDTH).uniform_(-0.001, 0.001)
        self.weights = nn.ParameterList(weights.unbind())

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(Product.apply(x, self.weights[0]))
        return Product.apply(hidden, self.weights[1])


class StackOfOwnBackward(Stack):
    block = OwnBackward


def splits_a_backward_of_its_own() -> None:
    """The compiler, not the module, separates the gradients of weights."""
    indices = stages_of("InterleavedZeroBubble", dist.get_rank(), RANKS)
    model = StackOfOwnBackward(2 * RANKS)
    expected = train_unsplit(model, F.mse_loss)
    stages = build(model, indices)
    schedule = make_schedule("InterleavedZeroBubble", stages, 2, loss_fn=F.mse_loss)
    output, losses = train(schedule, stages, expected)
    if output is not None:
        torch.testing.assert_close(output.cpu(), expected.output)
        mean = sum(losses).cpu() / len(losses)
        torch.testing.assert_close(mean, expected.loss)
    expected.check_grads(stages, **GRADS)


def refuses_a_builder() -> None:
    with pytest.raises(ValueError, match="split by the compiler; leave the argument"):
        xpp.PipelineStage(
            Mlp(), dist.get_rank(), RANKS, xpp.device(), dw_builder=lambda: None
        )
    dist.barrier()


def parsed(orders: Orders) -> dict[int, list[_Action | None]]:
    """Read actions; a dot is an idle moment."""
    return {
        rank: [None if text == "." else _Action.from_str(text) for text in row.split()]
        for rank, row in orders.items()
    }


V_ORDER = {
    0: "0F0  .   .  3F0 3B0  .   .  0B0",
    1: " .  1F0 2F0  .   .  2B0 1B0  . ",
}
UNBALANCED_ORDER = {
    0: "0F0 1F0  .   .  4F0 4B0  .   .  1B0 0B0",
    1: " .   .  2F0 3F0  .   .  3B0 2B0  .   . ",
}
SPLIT_ORDER = {
    0: "0F0 0F1 2F0 2F1  .  2I0 2W0 0I0 2I1 0W0 0I1 2W1 0W1",
    1: " .  1F0 1F1 3F0 3I0 3F1 1I0 3I1 3W0 1I1 1W0 3W1 1W1",
}
# The sends of backwards come after both of them, and their receives likewise.
REORDERED = {
    0: "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
    1: "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1",
}
# Upstream's example of lowering a V, run here after upstream has lowered it.
LOWERED_V = {
    0: "0F0 0F1  .  3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1",
    1: " .  1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 2W1 1W0 1W1",
}


class FromTable(PipelineScheduleMulti):
    """A schedule that runs a table in lock step, as upstream's for tests do."""

    def __init__(self, stages: Sequence[Any], count: int, orders: Orders) -> None:
        super().__init__(stages, count, **SUMMED)
        self.pipeline_order = parsed(orders)
        self._validate_and_set_stage_mapping(self.pipeline_order)


class FromLowered(_PipelineScheduleRuntime):
    """A schedule that runs a table with upstream's sends and receives."""

    def __init__(
        self, stages: Sequence[Any], count: int, orders: Orders, form: str
    ) -> None:
        super().__init__(stages, count, **SUMMED)
        self._prepare_schedule_with_comms(parsed(orders), format=form)


def table_of(orders: Orders) -> xpp.Schedule:
    """Read actions as a value."""
    cells = [row.replace(".", "").split() for row in orders.values()]
    return xpp.Schedule.from_cells(cells)


def indices_in(orders: Orders) -> list[int]:
    """Return the stages of this rank."""
    actions = parsed(orders)[dist.get_rank()]
    return sorted({action.stage_index for action in actions if action is not None})


def follows_a_table(orders: Orders, num_stages: int, count: int, form: str) -> None:
    model = Stack(num_stages)
    expected = train_unsplit(model)
    stages = build(model, indices_in(orders))
    if form == "own":
        schedule = xpp.ScheduleFromTable(stages, table_of(orders), **SUMMED)
    elif form:
        schedule = FromLowered(stages, count, orders, form)
    else:
        schedule = FromTable(stages, count, orders)
    with nothing_leaks():
        output, losses = train(schedule, stages, expected)
    dist.barrier()
    expected.check_result(output, losses)
    expected.check_grads(stages, **GRADS)


def sums_gradients_over_steps() -> None:
    """Backward-input and backward-weight actions, four steps, gradients kept."""
    model = Stack(4)
    expected = train_unsplit(model, num_backwards=4)
    stages = build(model, indices_in(SPLIT_ORDER))
    schedule = FromTable(stages, 2, SPLIT_ORDER)
    with nothing_leaks():
        for _ in range(4):
            feed(schedule.step, stages, expected.x, expected.target, [])
    expected.check_grads(stages, **GRADS)


RELAXED = {"rtol": 5e-3, "atol": 5e-3}
CASES = {
    "forward_only": (chains_forwards, ()),
    **{
        f"eval_inference_mode-{n}": (evaluates_without_gradients, (n,))
        for n in (*SINGLE, *LOOPED)
    },
    **{f"multi_iter-{n}": (runs_many_steps, (n,)) for n in SINGLE},
    **{f"kwargs_with_tracer-{n}": (takes_keywords_traced, (n,)) for n in SINGLE},
    **{f"grad_with_tracer-{n}": (has_gradients_traced, (n,)) for n in SINGLE},
    **{
        f"grad_with_manual-{n}-{'inferred' if is_inferred else 'stated'}": (
            has_gradients_manual,
            (n, is_inferred),
        )
        for n in SINGLE
        for is_inferred in (True, False)
    },
    **{
        f"grad_with_manual_interleaved-{n}": (trains_two_stages, (n, 4, RELAXED))
        for n in LOOPED
    },
    **{f"v_shape-{n}": (trains_two_stages, (n, 8, GRADS)) for n in V_SHAPED},
    **{
        f"model_kwargs-{n}": (takes_an_unused_keyword, (n,))
        for n in ("InterleavedZeroBubble", "Interleaved1F1B")
    },
    "weight_update_mlp": (splits_a_backward_of_its_own, ()),
    "dw_builder": (refuses_a_builder, ()),
    "non_symmetric-VShaped": (follows_a_table, (V_ORDER, 4, 1, "")),
    "non_symmetric-Unbalanced": (follows_a_table, (UNBALANCED_ORDER, 5, 1, "")),
    "runtime_custom_sched": (follows_a_table, (REORDERED, 2, 2, "compute_comms")),
    "native_zero_bubble": (sums_gradients_over_steps, ()),
    "own-VShaped": (follows_a_table, (V_ORDER, 4, 1, "own")),
    "own-Unbalanced": (follows_a_table, (UNBALANCED_ORDER, 5, 1, "own")),
    "own-ReorderedB": (follows_a_table, (REORDERED, 2, 2, "own")),
    "own-lowered_v": (follows_a_table, (LOWERED_V, 4, 2, "own")),
    "lowered_v": (follows_a_table, (LOWERED_V, 4, 2, "compute_only")),
}


@pytest.fixture(scope="module")
def found(worlds: Worlds) -> dict[str, list[str]]:
    return outcomes(worlds, CASES)


@pytest.mark.parametrize("case", CASES)
def test_it_holds_on_two_ranks(found: dict[str, list[str]], case: str) -> None:
    assert found[case] == []
