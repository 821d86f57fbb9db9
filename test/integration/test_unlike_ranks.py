"""Ranks with other meshes or other numbers of devices train as one process.

Tolerance as in `test_parity`: sums are taken in another order.
"""

import pytest
import torch
from integration.test_parity import check
from integration.training import (
    Job,
    Model,
    Report,
    Side,
    batch,
    build,
    make_schedule,
    mesh_of,
    run_step,
    train_joined,
)
from joining import join

from torch_xla_pp import AxisRules
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

VALUE = 4 * (4 * 3 * 8)  # bytes between the stages, for a microbatch

NAMES = AxisRules(
    parameters={
        "blocks.*.up.weight": ("hidden", None),
        "blocks.*.up.bias": ("hidden",),
        "blocks.*.down.weight": (None, "hidden"),
    },
    activations={"blocks.[0-9]": ("batch", "length", "embed")},
)


def rules(**axes: str | None) -> AxisRules:
    """Say what splits the batch, the embedding between stages, and hidden values."""
    whole = {"batch": None, "length": None, "embed": None, "hidden": None}
    return AxisRules(axes=whole | axes) | NAMES


BOTH = rules(batch="data", embed="model", hidden="model")
GRID = ("data", "model")
DATA = Side(sizes=(4,), sharding=rules(batch="data"))
CASES = {
    "other shape": (
        Side(axes=GRID, sizes=(2, 2), sharding=BOTH),
        Side(axes=GRID, sizes=(4, 1), sharding=BOTH),
    ),
    # From tensor to data parallelism.
    "other axis": (
        Side(
            axes=("model", "rest"),
            sizes=(2, 2),
            sharding=rules(embed="model", hidden="model"),
        ),
        DATA,
    ),
    "fewer devices": (Side(axes=GRID, sizes=(2, 2), sharding=BOTH), Side(sizes=(2,))),
    "uneven": (Side(sizes=(3,)), Side(sizes=(2,))),
}


def run_all(jobs: list[Job]) -> list[Report]:
    join(jobs[0].transport)
    return [train_joined(job) for job in jobs]


def job_of(case: str, *, rows: int = 16, **options: object) -> Job:
    return Job(
        sides=CASES[case],
        rows=rows,
        num_steps=2,
        evaluates=False,
        **options,  # type: ignore[arg-type]
    )


def test_meshes_may_differ(worlds: Worlds) -> None:
    jobs = [job_of(case, frontend="manual") for case in ("other shape", "other axis")]
    first, last = worlds.run(run_all, ranks=2, devices=4, args=(jobs,))
    for reports in zip(first, last, strict=True):
        check(list(reports))
    # Each device has a quarter, or under tensor parallelism of a pair a half.
    sent = [report.explanation.sent_bytes for report in first]
    assert sent == [VALUE // 4, VALUE // 2]
    assert [report.explanation.received_bytes for report in last] == [VALUE // 4] * 2
    moved = "float32[4, 3, 8] {} stage {}: 2x1x2 on 4 devices -> 4x1x1 on 4 devices"
    assert first[0].explanation.moves == (moved.format("to", 1),)
    assert last[0].explanation.moves == (moved.format("from", 0),)


@pytest.mark.parametrize(
    ("transport", "frontend"), [("in_graph", "traced"), ("host", "manual")]
)
def test_numbers_of_devices_may_differ(
    worlds: Worlds, transport: str, frontend: str
) -> None:
    job = job_of("fewer devices", transport=transport, frontend=frontend)
    reports = worlds.run(run_all, ranks=2, devices=(4, 2), args=([job],))
    check([report for (report,) in reports])


def test_slices_need_not_fit_and_tied_parameters_neither(worlds: Worlds) -> None:
    """Three devices to two and back, twice, with copies of a weight on both."""
    job = job_of(
        "uneven", rows=24, frontend="manual", schedule="Interleaved1F1B", is_tied=True
    )
    reports = worlds.run(run_all, ranks=2, devices=(3, 2), args=([job],))
    check([report for (report,) in reports])
    first, last = (copy for (report,) in reports for copy in report.tied)
    assert torch.equal(first, last)


def test_stages_of_one_rank_may_have_other_meshes(worlds: Worlds) -> None:
    job = job_of("other axis", frontend="manual", ranks=1, schedule="Interleaved1F1B")
    check(
        [report for (report,) in worlds.run(run_all, ranks=1, devices=4, args=([job],))]
    )


def refused(jobs: list[Job]) -> list[str]:
    """Return the error of each job, in each of which a rank has something wrong."""
    join()
    found = []
    for job in jobs:
        stages = build(job, Model(job.num_stages), mesh_of(job))
        schedule = make_schedule(job, stages)
        try:
            run_step(job, schedule, stages, *batch(job, 0))
            found.append("")
        except (ValueError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_mesh_that_does_not_fit_is_told_on_every_rank(worlds: Worlds) -> None:
    split = Side(sizes=(2,), sharding=rules(batch="data"))
    nameless = AxisRules(axes={"batch": None})
    jobs = [
        Job(sides=(split, Side(sizes=(3,))), rows=16, frontend="manual"),
        Job(
            sides=(split, Side(sizes=(3,), sharding=nameless)),
            rows=16,
            frontend="manual",
        ),
    ]
    for first, second in worlds.run(
        refused, ranks=2, devices=(2, 3), args=(jobs,), keep_workers=True
    ):
        assert first.startswith(
            "ValueError: microbatch of 4 rows does not divide over mesh axis 'data' of"
        )
        assert "stage 1: expected a mesh and axis rules that fit what it" in second
        assert (
            "shard of a value of shape [4, 3, 8] as ('batch', 'length', 'embed'): "
            "unknown logical axis 'length', known are batch" in second
        )
