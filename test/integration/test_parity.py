"""Every schedule gives the numbers of the unsplit model.

Tolerance 1e-5 of the largest value of a tensor, float32: both sides round
differently, since XLA fuses and orders sums in its own way. Parameters after AdamW
are compared to the same tolerance.
"""

from unittest import mock

import pytest
import torch
from integration.training import (
    LEARNING_RATE,
    LOOPED,
    SINGLE,
    V_SHAPED,
    Job,
    Report,
    train,
)

from torch_xla_pp.compile import stage_programs
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

SCHEDULES = (*SINGLE, *LOOPED, *V_SHAPED)


def check(reports: list[Report], tolerance: float = 1e-5) -> None:
    compared = set().union(*(report.errors for report in reports))
    assert {"losses", "gradients"} <= compared
    assert compared.intersection({"outputs", "eval outputs"})
    for report in reports:
        assert report.missing == []
        assert {k: v for k, v in report.errors.items() if not v < tolerance} == {}
        assert all(count == 0 for count in report.compiled.values()), report.compiled


@pytest.mark.parametrize("frontend", ["traced", "manual"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks_train_as_one_process(
    worlds: Worlds, schedule: str, frontend: str
) -> None:
    job = Job(schedule=schedule, frontend=frontend, devices=2)
    check(worlds.run(train, ranks=2, devices=2, args=(job,)))


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_rank_may_have_one_device(worlds: Worlds, schedule: str) -> None:
    job = Job(schedule=schedule, frontend="manual")
    check(worlds.run(train, ranks=2, devices=1, args=(job,)))


def train_with(job: Job, most_copied: int) -> Report:
    """Train where sums of up to so many bytes may pass as one."""
    with mock.patch.object(stage_programs, "_MOST_COPIED_BYTES", most_copied):
        return train(job)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sums_of_larger_weights_pass_as_one(worlds: Worlds, schedule: str) -> None:
    job = Job(
        schedule=schedule,
        frontend="manual",
        takes_outputs=False,
        width=144,
        length=64,
        max_norm=0.5,
    )
    reports = worlds.run(train_with, ranks=2, devices=1, args=(job, 1 << 20))
    others = worlds.run(train_with, ranks=2, devices=1, args=(job, 0))
    for one, each in zip(reports, others, strict=True):
        assert one.bundles - each.bundles == {"sum:flat:sums"}
        assert one.errors == each.errors
        assert all(x.equal(each.values[name]) for name, x in one.values.items())
        # Gradients are sums over 512 rows, and AdamW makes steps of a size even of
        # those that are next to zero.
        assert one.errors.pop("parameters") < LEARNING_RATE / 2
    check(reports, tolerance=5e-5)


@pytest.mark.parametrize("transport", ["", "host"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_backward_may_be_one_program_with_its_forward(
    worlds: Worlds, schedule: str, transport: str
) -> None:
    job = Job(
        schedule=schedule, frontend="manual", transport=transport, takes_outputs=False
    )
    reports = worlds.run(train, ranks=2, devices=1, args=(job,))
    check(reports)
    programs = set().union(*(report.programs for report in reports))
    if schedule == "LoopedBFS":  # whose rank 0 first waits for the last microbatch
        assert programs == {"forward", "backward", "inference"}
        return
    # Where backwards of the last stage are whole, and where they are those of inputs,
    # or the last action of a rank.
    is_one = schedule not in ("InterleavedZeroBubble", "ZBVZeroBubble")
    assert is_one == ("forward and backward" in programs)
    assert (schedule != "Interleaved1F1B") == ("forward and backward input" in programs)
    assert programs.isdisjoint({"backward", "backward input"})


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble", "DualPipeV"])
def test_stages_may_send_through_the_host(worlds: Worlds, schedule: str) -> None:
    job = Job(schedule=schedule, frontend="manual", devices=2, transport="host")
    check(worlds.run(train, ranks=2, devices=2, args=(job,)))


@pytest.mark.parametrize(
    ("schedule", "frontend", "devices"),
    [("1F1B", "manual", 2), ("InterleavedZeroBubble", "traced", 1)],
)
def test_four_ranks_train_as_one_process(
    worlds: Worlds, schedule: str, frontend: str, devices: int
) -> None:
    job = Job(
        schedule=schedule,
        frontend=frontend,
        ranks=4,
        devices=devices,
        num_microbatches=8,
        rows=16,
    )
    check(worlds.run(train, ranks=4, devices=devices, args=(job,)))


@pytest.mark.parametrize(
    ("frontend", "remat"), [("traced", "full"), ("manual", "all but mm")]
)
def test_values_may_be_computed_again(
    worlds: Worlds, frontend: str, remat: str
) -> None:
    job = Job(schedule="ZBVZeroBubble", frontend=frontend, devices=2, remat=remat)
    check(worlds.run(train, ranks=2, devices=2, args=(job,)))


def test_bfloat16_trains_as_one_process(worlds: Worlds) -> None:
    job = Job(dtype=torch.bfloat16, devices=2)
    reports = worlds.run(train, ranks=2, devices=2, args=(job,))
    for report in reports:
        # AdamW moves a parameter by about the learning rate, whatever the size of its
        # gradient, and the sign of a gradient that is all rounding may differ.
        assert report.parameter_difference <= 2.1 * LEARNING_RATE * job.num_steps
        del report.errors["parameters"]
    # bfloat16 keeps 8 bits of a mantissa: one rounding is up to 0.4 %.
    check(reports, tolerance=4e-2)


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
def test_gradients_are_summed_if_the_schedule_does_not_scale(
    worlds: Worlds, schedule: str
) -> None:
    job = Job(schedule=schedule, scale_grads=False, num_steps=1)
    check(worlds.run(train, ranks=2, devices=1, args=(job,)))


@pytest.mark.parametrize("frontend", ["traced", "manual"])
def test_a_model_built_on_meta_trains_once_loaded(
    worlds: Worlds, frontend: str
) -> None:
    job = Job(init_device="meta", frontend=frontend, num_steps=1, devices=2)
    check(worlds.run(train, ranks=2, devices=2, args=(job,)))


def test_host_inputs_and_no_eval_first(worlds: Worlds) -> None:
    job = Job(inputs_on_device=False, eval_first=False, devices=2)
    check(worlds.run(train, ranks=2, devices=2, args=(job,)))


def test_weights_may_be_sharded_by_rules(worlds: Worlds) -> None:
    rules = {"*.up.weight": ("model", None), "*.down.weight": (None, "model")}
    job = Job(devices=2, axes=("model",), sharding=rules)
    check(worlds.run(train, ranks=2, devices=2, args=(job,)))
