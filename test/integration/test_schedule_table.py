"""Tables of actions run on real ranks and give the numbers of the unsplit model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from integration.test_parity import check
from integration.training import (
    Job,
    Model,
    batch,
    build,
    loss_fn,
    mesh_of,
    run_step,
    train,
)
from joining import join
from torch.profiler import ProfilerActivity, profile

import torch_xla_pp as xpp
from torch_xla_pp.schedule import zb1p
from torch_xla_pp.testing import Worlds
from torch_xla_pp.torch_compat import order_of

pytestmark = pytest.mark.worlds

# Stages 0 and 3 are on rank 0. Backwards are whole or split, microbatches change
# places; cells are idle, lowered or overlapped.
BY_HAND = """\
0F0,0F1,0SEND_F0,3F0,3I0,0F3,3F1,3W0,3B1,0F2,0B1,(3F2;0B0)OVERLAP_F_B,3F3,3B3,0I3,3B2,0B2,0W3
1F1,1F0,2F0,,2F1,1RECV_F3,2B0,2I1,1F3,1B1,2W1,1B0,1F2,2F2,2F3,2B3,1I3,2B2,1B2,1W3
"""


@pytest.mark.parametrize(
    "table", [zb1p(2, 4).to_csv(), BY_HAND], ids=["zb1p", "by hand"]
)
def test_a_table_trains_as_one_process(worlds: Worlds, table: str) -> None:
    job = Job(table=table, frontend="manual", num_steps=2)
    check(worlds.run(train, ranks=2, devices=1, args=(job,)))


def names_and_orders(job: Job, path: str) -> tuple[list[str], list[str], str]:
    """Return what was profiled in a training step and in `eval`, and the order."""
    join(job.transport)
    stages = build(job, Model(job.num_stages), mesh_of(job))
    schedule = xpp.ScheduleFromTable.from_csv(stages, path, loss_fn)

    def profiled(call: Any) -> list[str]:
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            call()
        events = sorted(trace.events(), key=lambda event: event.time_range.start)
        return [e.name.removeprefix("PP:") for e in events if e.name.startswith("PP:")]

    x, y = batch(job, 0)
    stepped = profiled(lambda: run_step(job, schedule, stages, x, y))
    args = (x,) if stages[0].is_first else ()
    kwargs = {"target": y.to(xpp.device())} if stages[-1].is_last else {}
    evaluated = profiled(lambda: schedule.eval(*args, **kwargs))
    return stepped, evaluated, str(order_of(schedule))


def test_a_file_is_run_in_its_order_and_eval_runs_its_forwards(
    worlds: Worlds, tmp_path: Path
) -> None:
    path = tmp_path / "order.csv"
    order = zb1p(2, 2)
    job = Job(table=order.to_csv(path), frontend="manual", num_microbatches=2)
    found = worlds.run(names_and_orders, ranks=2, devices=1, args=(job, str(path)))
    for rank, (stepped, evaluated, printed) in enumerate(found):
        row = [str(action) for action in order.actions[rank]]
        assert stepped == row
        assert evaluated == [text for text in row if "F" in text]
        assert printed == str(order)


def fault_of(job: Job, table: str) -> str:
    """Return the error that a rank gets for a table that its stages do not fit."""
    join(job.transport)
    stages = build(job, Model(job.num_stages), mesh_of(job))
    try:
        xpp.ScheduleFromTable(stages, table, loss_fn)
    except (ValueError, xpp.ScheduleError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("table", "faults"),
    [
        ("0F0,0B0\n1F0,1B0\n2F0,2B0\n", ["expected a table of 2 ranks, got 3"] * 2),
        ("0F0,0B0\n1F0,2F0,2B0,1B0\n", ["expected a table of 2 stages, got 3"] * 2),
        (
            "1F0,1B0\n0F0,0B0\n",
            [r"expected (1,) as the table has on rank 0, got (0,)", "(0,) as the"],
        ),
        ("0F0,0B0\n1B0,1F0\n", ["ScheduleError: schedule: expected one that can"] * 2),
    ],
)
def test_a_table_that_does_not_fit_is_refused_on_every_rank(
    worlds: Worlds, table: str, faults: list[str]
) -> None:
    job = Job(frontend="manual")
    found = worlds.run(fault_of, ranks=2, devices=1, args=(job, table))
    assert all(fault in text for fault, text in zip(faults, found, strict=True)), found


def fault_of_first_step(job: Job, tables: tuple[str, str]) -> str:
    """Return the error that a rank gets for its table in the first step."""
    join(job.transport)
    stages = build(job, Model(job.num_stages), mesh_of(job))
    table = tables[stages[0].group_rank]
    schedule = xpp.ScheduleFromTable(stages, table, loss_fn)
    x, y = batch(job, 0)
    try:
        run_step(job, schedule, stages, x, y)
    except xpp.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("tables", "fault"),
    [
        # The second microbatch's backward waits for a forward that waits for it.
        (("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",) * 2, "wait for each other"),
        (
            (
                "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
                "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n",
            ),
            "order: expected the same on every rank",
        ),
    ],
)
def test_a_table_that_cannot_run_is_refused_before_the_first_step(
    worlds: Worlds, tables: tuple[str, str], fault: str
) -> None:
    job = Job(frontend="manual", num_microbatches=2)
    found = worlds.run(fault_of_first_step, ranks=2, devices=1, args=(job, tables))
    assert all(fault in text for text in found), found


def test_stages_of_another_kind_are_refused() -> None:
    with pytest.raises(TypeError, match="communicate by themselves, got Linear"):
        xpp.ScheduleFromTable([torch.nn.Linear(1, 1)], zb1p(1, 1))
    with pytest.raises(TypeError, match="communicate by themselves, got none"):
        xpp.ScheduleFromTable([], zb1p(1, 1))
