import csv
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule.upstream import make
from strategies import legal_tables, stage_dags, tables
from torch.distributed.pipelining import ScheduleDualPipeV
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _PipelineScheduleRuntime,
)

from torch_xla_pp.schedule import (
    Action,
    Schedule,
    dualpipev,
    interleaved_1f1b,
    verify,
    zb1p,
)

pytestmark = pytest.mark.pure


def rows(*texts: str) -> Schedule:
    return Schedule.from_cells(text.split() for text in texts)


@given(tables())
def test_a_table_goes_through_text_and_csv(schedule: Schedule) -> None:
    assert Schedule.from_text(str(schedule)) == schedule
    assert Schedule.from_csv(schedule.to_csv()) == schedule


def test_a_table_prints_as_steps_by_ranks() -> None:
    schedule = rows("0F0 0F10 0B0", "1F0", "")
    assert str(schedule).splitlines() == [
        "step  rank 0  rank 1  rank 2",
        "0     0F0     1F0     .",
        "1     0F10    .       .",
        "2     0B0     .       .",
    ]


def test_the_properties_of_a_table() -> None:
    schedule = rows("0F0 3F0 3F5 0F1", "2F0 1F0")
    assert (schedule.num_ranks, schedule.num_stages) == (2, 4)
    assert schedule.num_microbatches == 6
    assert schedule.placement == {0: 0, 1: 1, 2: 1, 3: 0}
    assert schedule.stages_of(0) == (0, 3)


def test_backwards_come_right_after_forwards() -> None:
    schedule = rows("0F0 2F0 0F1 2B0 2F1 0B0 2I1 2W1 0B1", "1F0 1F1 1B0 1B1")
    assert schedule.with_backwards_at_once(2) == rows(
        "0F0 2F0 2B0 0F1 2F1 2I1 0B0 2W1 0B1", "1F0 1F1 1B0 1B1"
    )
    assert schedule.with_backwards_at_once(3) == schedule
    followed = interleaved_1f1b(2, 4, 2)
    assert followed.with_backwards_at_once(3) == followed


@given(st.data())
def test_backwards_of_the_last_stage_may_always_come_at_once(
    data: st.DataObject,
) -> None:
    dag = data.draw(stage_dags())
    schedule = data.draw(legal_tables(dag))
    moved = schedule.with_backwards_at_once(dag.num_stages - 1)
    verify(moved, dag.edges, placement=dag.placement, carriers=dag.carriers)
    for before, after in zip(schedule.actions, moved.actions, strict=True):
        assert sorted(map(str, before)) == sorted(map(str, after))


def test_whole_backwards_are_those_that_weights_come_right_after() -> None:
    schedule = rows("0F0 0F1 0I0 0W0 0I1 1F0 0W1 1I0 1W0", "2F0 2B0 3I0 3W1")
    assert {str(x) for x in schedule.whole_backwards(0)} == {"0I0", "1I0"}
    assert schedule.whole_backwards(1) == frozenset()


def test_a_table_without_actions_has_no_stages() -> None:
    schedule = Schedule(actions=((), ()))
    assert (schedule.num_stages, schedule.num_microbatches) == (0, 0)


def test_upstream_reads_our_files(tmp_path: Path) -> None:
    path = tmp_path / "zb1p.csv"
    ours = zb1p(2, 4, 2)
    assert ours.to_csv(path) == path.read_text()
    theirs, _ = make(PipelineScheduleMulti, 2, 4, style="loop", per_rank=2)
    theirs._load_csv(str(path))
    order = theirs.pipeline_order
    assert Schedule.from_cells([map(str, order[rank]) for rank in (0, 1)]) == ours


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_we_read_upstreams_files(tmp_path: Path, form: str) -> None:
    path = tmp_path / "dualpipev.csv"
    theirs, _ = make(ScheduleDualPipeV, 4, 10, style="v", per_rank=2)
    theirs._dump_csv(str(path), format=form)
    assert Schedule.from_csv(path) == dualpipev(4, 10)
    assert Schedule.from_csv(str(path)) == dualpipev(4, 10)


def test_a_lowered_file_keeps_its_order(tmp_path: Path) -> None:
    plain, lowered = tmp_path / "plain.csv", tmp_path / "lowered.csv"
    ours = interleaved_1f1b(2, 4, 2)
    ours.to_csv(plain)
    theirs, _ = make(_PipelineScheduleRuntime, 2, 4, style="loop", per_rank=2)
    theirs._load_csv(str(plain))
    theirs._dump_csv(str(lowered))
    with lowered.open(newline="") as file:
        assert any("SEND_F" in cell for row in csv.reader(file) for cell in row)
    assert Schedule.from_csv(lowered) == ours


def test_idle_lowered_and_overlapped_cells() -> None:
    text = (
        "0UNSHARD,,0F0,0SEND_F0,(0F1;3B0)OVERLAP_F_B,0RECV_B1,0RESHARD,0REDUCE_GRAD\n\n"
    )
    assert Schedule.from_csv(text) == rows("0F0 0F1 3B0", "")


def test_every_cell_that_is_no_action_is_named() -> None:
    with pytest.raises(ValueError, match="rank 1, cell 1: .* got '1X0'") as error:
        Schedule.from_csv("0F0,SEND\n1F0,1X0\n")
    assert "rank 0, cell 1: action: expected" in str(error.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "expected a table that begins with"),
        ("0F0,0B0", "expected a table that begins with"),
        ("step  rank 0  rank 1\n0  0F0", "step 0: expected 2 cells, got 1"),
    ],
)
def test_texts_that_are_no_table_are_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Schedule.from_text(text)


def test_values_that_are_no_table_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank, got none"):
        Schedule(actions=())
    with pytest.raises(TypeError, match="rank 0: expected a tuple of actions, got li"):
        Schedule(actions=([],))
    with pytest.raises(TypeError, match="rank 0, step 0: expected an Action, got '0F0"):
        Schedule(actions=(("0F0",),))


class TaskType(Enum):
    FWD = 1
    BWD = 2
    BWD_I = 3
    BWD_W = 4


@dataclass(frozen=True)
class Task:
    """A task with the attributes of JaxPP's."""

    stage_id: int
    mubatch_idx: int
    fwd_or_bwd: TaskType


def test_tasks_of_jaxpp_are_taken() -> None:
    fused = (Task(1, 0, TaskType.FWD), Task(1, 0, TaskType.BWD))
    tasks = [
        [Task(0, 0, TaskType.FWD), None, Task(0, 0, TaskType.BWD_I)],
        [None, fused],
    ]
    assert Schedule.from_tasks(tasks) == rows("0F0 0I0", "1F0 1B0")


def test_tasks_may_be_triples() -> None:
    tasks = [[(0, 0, "FWD"), None, (0, 0, "I"), ((0, 0, TaskType.BWD_W),)], []]
    assert Schedule.from_tasks(tasks) == rows("0F0 0I0 0W0", "")


@pytest.mark.parametrize(
    ("task", "fault"),
    [
        ((0, 0, "SEND"), "stage 0, microbatch 0: expected a kind of F, B, I, W, FWD"),
        ("0F0", r"expected \(stage, microbatch, kind\), or the attributes"),
        ((0, 1), r"expected \(stage, microbatch, kind\), or the attributes"),
    ],
)
def test_other_tasks_are_refused(task: object, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Schedule.from_tasks([[task]])


def test_a_schedule_is_a_value() -> None:
    action = Action(stage=0, kind="F", microbatch=0)
    assert hash(rows("0F0")) == hash(Schedule(actions=((action,),)))
