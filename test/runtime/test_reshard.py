"""Ranks with other meshes or other numbers of devices train as one process.

Tolerance as in `test_parity`: sums are taken in another order.
"""

import pytest
from joining import join
from runtime.test_parity import check
from runtime.training import Job, Report, Side, train_joined

from torch_xla_pp import AxisRules
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

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
    # (2, 2) to (4, 1), under the same rules.
    "other shape": (
        Side(axes=GRID, sizes=(2, 2), sharding=BOTH),
        Side(axes=GRID, sizes=(4, 1), sharding=BOTH),
    ),
    "tensor to data parallel": (
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
        frontend="manual",
        rows=rows,
        num_steps=2,
        eval_first=False,
        **options,  # type: ignore[arg-type]
    )


def test_meshes_may_differ(worlds: Worlds) -> None:
    jobs = [job_of("other shape"), job_of("tensor to data parallel")]
    for reports in zip(
        *worlds.run(run_all, ranks=2, devices=4, args=(jobs,)), strict=True
    ):
        check(list(reports))


@pytest.mark.parametrize("transport", ["in_graph", "host"])
def test_numbers_of_devices_may_differ(worlds: Worlds, transport: str) -> None:
    jobs = [job_of("fewer devices", transport=transport)]
    for reports in zip(
        *worlds.run(run_all, ranks=2, devices=(4, 2), args=(jobs,)), strict=True
    ):
        check(list(reports))


def test_slices_need_not_fit_and_tied_parameters_neither(worlds: Worlds) -> None:
    """Three devices to two and back, twice, with copies of a weight on both."""
    job = job_of("uneven", rows=24, schedule="Interleaved1F1B", is_tied=True)
    reports = worlds.run(run_all, ranks=2, devices=(3, 2), args=([job],))
    check([report for (report,) in reports])
