"""Wrong input gives one clear error on every rank, before anything hangs."""

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_xla.distributed.spmd as xs
from integration.training import (
    Job,
    Model,
    Part,
    batch,
    build,
    loss_fn,
    mesh_of,
    run_step,
)
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
)
from torch.nn.parallel import DistributedDataParallel

import torch_xla_pp as xpp
from torch_xla_pp.runtime.rank import RankPipeline
from torch_xla_pp.runtime.wrong_input import check_device
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

JOB = Job(frontend="manual")


def raised_on_every_rank(
    worlds: Worlds, function: Callable[..., Any], *args: Any, devices: int = 1
) -> list[str]:
    """Run on two ranks; return the errors, which must come long before a time limit."""
    start = time.monotonic()
    outcomes = worlds.run_outcomes(
        function, ranks=2, devices=devices, args=args, keep_workers=True
    )
    assert time.monotonic() - start < 60
    assert all(outcome.error for outcome in outcomes), outcomes
    return [f"{outcome.error}: {outcome.message}" for outcome in outcomes]


def stages_of(job: Job) -> list[Any]:
    dist.init_process_group("xla_pp")
    torch.manual_seed(0)
    return build(job, Model(job.num_stages), mesh_of(job))


def uneven_batch(rows: int) -> None:
    stages = stages_of(JOB)
    schedule = Schedule1F1B(stages[0], 4, loss_fn=loss_fn)
    x, y = batch(JOB, 0)
    run_step(JOB, schedule, stages, x, y)
    run_step(JOB, schedule, stages, x[:rows], y[:rows])


@pytest.mark.parametrize("rows", [7, 3])
def test_a_batch_that_does_not_divide_into_microbatches(
    worlds: Worlds, rows: int
) -> None:
    """As the last one of a loader, of fewer rows than microbatches for one."""
    for text in raised_on_every_rank(worlds, uneven_batch, rows):
        assert text.startswith(
            "StageShapeError: step: expected a batch of rows that divide into 4 equal "
            f"microbatches, got {rows} rows. Fill up a short one on all ranks, "
            "x, y = xpp.pad_batch"
        )


class Ears:
    """A listener that waits for a report."""

    def __init__(self) -> None:
        self.told = threading.Event()

    def report(self, generation: int, report: str, num_ended: int) -> None:
        self.told.set()

    def end_step(self, generation: int, num_ended: int) -> None:
        pass

    def end(self, generation: int) -> None:
        pass


def uneven_later(transport: str) -> tuple[list[str], float]:
    """Give rank 0 a wrong batch while rank 1 still ends the step before.

    Returns:
        The outcome of each step, and by which factor gradients are those of one step.
    """
    group = join(transport)
    ears = Ears()
    group.rendezvous.join(ears)
    torch.manual_seed(0)
    stages = build(JOB, Model(JOB.num_stages), mesh_of(JOB))
    schedule = Schedule1F1B(stages[0], 4, loss_fn=loss_fn)
    x, y = batch(JOB, 0)
    outcomes: list[str] = []
    end_step = RankPipeline.end_step

    def end_late(rank: RankPipeline) -> None:
        if group.rank() == 1 and len(outcomes) == 1:
            assert ears.told.wait(60)
        end_step(rank)

    first = None
    with mock.patch.object(RankPipeline, "end_step", end_late):
        for rows in (8, 8, 7, 8):
            try:
                run_step(JOB, schedule, stages, x[:rows], y)
            except xpp.errors.StageShapeError:
                outcomes.append("error")
            else:
                outcomes.append("well")
            grad = next(stages[0].submod.parameters()).grad
            assert grad is not None
            first = grad.cpu() if first is None else first
    return outcomes, float(grad.cpu().norm() / first.norm())


@pytest.mark.parametrize("transport", ["in_graph", "host"])
def test_a_wrong_batch_leaves_the_step_before_it_alone(
    worlds: Worlds, transport: str
) -> None:
    for outcomes, factor in worlds.run(
        uneven_later, ranks=2, devices=1, args=(transport,), keep_workers=True
    ):
        assert outcomes == ["well", "well", "error", "well"]
        assert factor == pytest.approx(3)


def uneven_target() -> None:
    stages = stages_of(JOB)
    schedule = Schedule1F1B(stages[0], 4, loss_fn=loss_fn)
    x, y = batch(JOB, 0)
    run_step(JOB, schedule, stages, x, y[:7])


def test_a_target_that_does_not_divide_into_microbatches(worlds: Worlds) -> None:
    for text in raised_on_every_rank(worlds, uneven_target):
        assert "divide into 4 equal microbatches, got 7 rows" in text


def input_that_needs_a_gradient() -> None:
    dist.init_process_group("xla_pp")
    rank, x = dist.get_rank(), torch.zeros(4, 8)
    stage = xpp.PipelineStage(nn.Linear(8, 8), rank, 2, xpp.device())
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, _: output.sum())
    for needs_grad in (False, True):
        args = () if rank else (x.requires_grad_(needs_grad),)
        schedule.step(*args, target=x if rank else None)


def test_an_input_that_needs_a_gradient_in_a_later_step(worlds: Worlds) -> None:
    for text in raised_on_every_rank(worlds, input_that_needs_a_gradient):
        assert "stage 0: expected inputs that need no gradient, got one with" in text


def uneven_rows() -> None:
    job = Job(frontend="manual", devices=2, rows=12)
    stages = stages_of(job)
    schedule = Schedule1F1B(stages[0], 4, loss_fn=loss_fn)
    run_step(job, schedule, stages, *batch(job, 0))


def test_a_microbatch_that_does_not_divide_over_devices(worlds: Worlds) -> None:
    for text in raised_on_every_rank(worlds, uneven_rows, devices=2):
        assert "microbatch of 3 rows does not divide over mesh axis 'data' of 2" in text


def batch_that_cannot_be_cut(kind: str) -> None:
    """In the first step, before a stage is called."""
    job = Job(frontend="manual", devices=2)
    stages = stages_of(job)
    schedule = Schedule1F1B(stages[0], 4, loss_fn=loss_fn)
    if dist.get_rank():
        run_step(job, schedule, stages, *batch(job, 0))
        return
    if kind == "wrapped":
        mesh = xs.Mesh(np.arange(2), (2,), ("data",))
        tokens = batch(job, 0)[0].to(xpp.device())
        schedule.step(xs.mark_sharding(tokens, mesh, ("data", None)))
    schedule.step(torch.zeros((), dtype=torch.long))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("wrapped", "step: expected plain tensors as batch and target, got XLASharded"),
        ("scalar", "Dimension specified as 0 but tensor has no dimensions"),
    ],
)
def test_a_batch_that_cannot_be_cut(worlds: Worlds, kind: str, expected: str) -> None:
    first, second = raised_on_every_rank(
        worlds, batch_that_cannot_be_cut, kind, devices=2
    )
    assert expected in first and expected in second
    assert "(raised on rank 0): stage 0, step 1" in second


def counted_after_a_refused_batch() -> int:
    """Rank 0 refuses a batch before it counts the step, which rank 1 has begun."""
    job = Job(frontend="manual", devices=2)
    stages = stages_of(job)
    schedule = Schedule1F1B(stages[0], 4, loss_fn=loss_fn)
    mesh = xs.Mesh(np.arange(2), (2,), ("data",))
    run_step(job, schedule, stages, *batch(job, 0))
    # The other rank must not hear of the next step in this one.
    dist.barrier()
    with pytest.raises(TypeError, match="expected plain tensors"):
        if dist.get_rank():
            run_step(job, schedule, stages, *batch(job, 1))
        tokens = batch(job, 1)[0].to(xpp.device())
        schedule.step(xs.mark_sharding(tokens, mesh, ("data", None)))
    run_step(job, schedule, stages, *batch(job, 2))
    return int(stages[0].num_steps)


def test_ranks_number_steps_alike_after_one_was_refused(worlds: Worlds) -> None:
    """Random numbers depend on the number."""
    assert worlds.run(counted_after_a_refused_batch, ranks=2, devices=2) == [2, 2]


def wrapped_for_data_parallelism() -> None:
    dist.init_process_group("xla_pp")
    module = DistributedDataParallel(nn.Linear(2, 2))
    xpp.PipelineStage(module, dist.get_rank(), 2, xpp.device())


def test_a_module_that_is_wrapped_for_data_parallelism(worlds: Worlds) -> None:
    for text in raised_on_every_rank(worlds, wrapped_for_data_parallelism):
        assert "TypeError: stage: expected the model itself, got Distributed" in text


def few_microbatches(name: str) -> None:
    if name == "1F1B":
        Schedule1F1B(stages_of(JOB)[0], 1, loss_fn=loss_fn)
    elif name == "DualPipeV":
        job = Job(frontend="manual", schedule="DualPipeV")
        ScheduleDualPipeV(stages_of(job), 3, loss_fn=loss_fn)
    else:
        job = Job(frontend="manual", schedule="Interleaved1F1B")
        ScheduleInterleaved1F1B(stages_of(job), 5, loss_fn=loss_fn)


@pytest.mark.parametrize("name", ["1F1B", "DualPipeV", "Interleaved1F1B"])
def test_fewer_microbatches_than_a_schedule_needs(worlds: Worlds, name: str) -> None:
    for text in raised_on_every_rank(worlds, few_microbatches, name):
        assert text.startswith("ValueError: ")
        assert "microbatches" in text


def index_out_of_range() -> None:
    dist.init_process_group("xla_pp")
    rank = dist.get_rank()
    part = Part(Model(2), rank)
    stage = xpp.PipelineStage(part, 5 * rank, 2, xpp.device())
    schedule = ScheduleGPipe(stage, 2, loss_fn=loss_fn)
    schedule.step(torch.zeros(2, 3, dtype=torch.long))


def test_a_stage_index_out_of_range(worlds: Worlds) -> None:
    for text in raised_on_every_rank(worlds, index_out_of_range):
        assert text.startswith("ValueError: stage_index: expected one of 0..1, got 5.")


def one_stage_twice() -> None:
    dist.init_process_group("xla_pp")
    stage = xpp.PipelineStage(Part(Model(2), 0), 0, 2, xpp.device())
    schedule = ScheduleGPipe(stage, 2, loss_fn=loss_fn)
    schedule.step(torch.zeros(2, 3, dtype=torch.long))


def test_two_ranks_that_claim_one_stage(worlds: Worlds) -> None:
    for text in raised_on_every_rank(worlds, one_stage_twice):
        assert text.startswith("PlanError: pipeline: the ranks do not build one")
        assert "stage 0: expected on one rank, got it on ranks [0, 1]" in text
        assert "stage 1: expected on one rank, got it on none" in text


class Half(nn.Module):
    """A stage whose output or input differs from what its neighbour has."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).to(self.dtype)


def unfitting(width: int, dtype: torch.dtype, is_declared: bool) -> None:
    dist.init_process_group("xla_pp")
    rank = dist.get_rank()
    module = Half(4, dtype) if rank == 0 else Half(width, torch.float32)
    declared = {}
    if rank == 1 and is_declared:
        example = torch.zeros(2, width)
        declared = {"input_args": example, "output_args": example}
    stage = xpp.PipelineStage(module, rank, 2, xpp.device(), **declared)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        schedule.step(torch.zeros(4, 4))
    else:
        schedule.step(target=torch.zeros(4, width).to(xpp.device()))


def test_an_output_that_the_next_stage_cannot_take(worlds: Worlds) -> None:
    for text in raised_on_every_rank(worlds, unfitting, 6, torch.float32, False):
        assert text.startswith("StageShapeError: stage 1: its module cannot run on")
        assert "inputs (float32[2, 4])" in text


@pytest.mark.parametrize(
    ("width", "dtype", "offered"),
    [(6, torch.float32, "float32[2, 4]"), (4, torch.bfloat16, "bfloat16[2, 4]")],
)
def test_an_output_that_the_next_stage_does_not_declare(
    worlds: Worlds, width: int, dtype: torch.dtype, offered: str
) -> None:
    for text in raised_on_every_rank(worlds, unfitting, width, dtype, True):
        expected = f"stage 1: expected inputs float32[2, {width}], got {offered}"
        assert text.startswith(f"StageShapeError: {expected} from stage 0")


def test_a_meta_module_without_values(worlds: Worlds) -> None:
    for text in raised_on_every_rank(worlds, unloaded):
        assert "module built on meta without: " in text
        assert "load_state_dict" in text


def unloaded() -> None:
    dist.init_process_group("xla_pp")
    rank = dist.get_rank()

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    with torch.device("meta"):
        module = Bare()
    stage = xpp.PipelineStage(module, rank, 2, xpp.device())
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    schedule.step(torch.zeros(4, 4))


def wrong_device() -> None:
    dist.init_process_group("xla_pp")
    xpp.PipelineStage(nn.Linear(2, 2), dist.get_rank(), 2, torch.device("cpu"))


def test_a_stage_on_another_device(worlds: Worlds) -> None:
    for text in raised_on_every_rank(worlds, wrong_device):
        assert "device: expected the XLA device, got cpu. Pass xpp.device()" in text


def test_a_mesh_in_the_place_of_the_device() -> None:
    with pytest.raises(ValueError, match=r"expected the XLA device, got \('pp',\)"):
        check_device(("pp",))  # type: ignore[arg-type]


def wrong_rule() -> None:
    job = Job(frontend="manual", devices=2, sharding={"*.up.bias": ("rows",)})
    stages_of(job)


def hooked_parameter() -> None:
    stages = stages_of(JOB)
    schedule = Schedule1F1B(stages[0], 4, loss_fn=loss_fn)
    run_step(JOB, schedule, stages, *batch(JOB, 0))
    if dist.get_rank() == 1:
        first = next(stages[0].submod.parameters())
        first.register_post_accumulate_grad_hook(lambda parameter: None)
        # What has no backward needs no gradients.
    x, y = batch(JOB, 1)
    schedule.eval(
        *((x,) if stages[0].is_first else ()),
        **({"target": y} if stages[0].is_last else {}),
    )
    run_step(JOB, schedule, stages, x, y)


def test_a_hook_of_a_parameter_is_refused_when_it_is_trained(worlds: Worlds) -> None:
    for text in raised_on_every_rank(worlds, hooked_parameter):
        assert text.startswith("PipelineError: stage 1: expected parameters without ")
        assert "change parameter.grad after the step" in text


def test_a_sharding_rule_that_does_not_fit(worlds: Worlds) -> None:
    for text in raised_on_every_rank(worlds, wrong_rule, devices=2):
        assert "rule '*.up.bias' gives ('rows',): unknown axis 'rows'" in text


def test_a_group_in_the_place_of_examples() -> None:
    text = (
        "input_args: expected a tensor or a tuple of tensors, got str. Pass arguments"
    )
    with pytest.raises(TypeError, match=text):
        xpp.PipelineStage(nn.Identity(), 0, 1, torch.device("xla"), "group")  # type: ignore[arg-type]
