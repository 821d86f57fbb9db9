"""What upstream's test_schedule asserts of schedules as data.

Upstream lowers an order to sends and receives and simulates it; here an order has
none, and is verified. The orders are those of torch's own classes.
"""

from pathlib import Path

import pytest
from schedule.upstream import make
from torch.distributed.pipelining import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _add_unshard_reshard,
)

from torch_xla_pp import Action, Schedule, ScheduleError
from torch_xla_pp.schedule import chain_of, dualpipev, verify
from upstream.test_schedule_multiproc import LOWERED_V, V_ORDER

pytestmark = pytest.mark.pure

# Stages per rank, microbatches, ranks. Upstream has (4, 128, 64) as well, which takes
# ten seconds.
SIZES = [
    *((2, 2, 2), (2, 4, 4), (2, 8, 2), (2, 8, 4), (2, 8, 8)),
    *((4, 4, 4), (4, 8, 4), (4, 8, 8), (4, 16, 4), (4, 32, 4), (4, 64, 4)),
    *((4, 16, 16), (4, 32, 32)),
    *((3, 2, 2), (3, 8, 2), (3, 12, 4), (4, 6, 3), (4, 10, 5)),
    *((2, 3, 4), (2, 10, 4), (2, 15, 4)),
]


def stated(cls: type, num_ranks: int, count: int, style: str, per_rank: int) -> list:
    """Return the cells of the order that a class states."""
    schedule, _ = make(cls, num_ranks, count, style=style, per_rank=per_rank)
    order = schedule.pipeline_order
    return [[str(a) if a else "" for a in order[rank]] for rank in range(num_ranks)]


@pytest.mark.parametrize(("per_rank", "count", "num_ranks"), SIZES)
@pytest.mark.parametrize(
    "cls", [ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble]
)
def test_orders_of_looped_stages_can_run(
    cls: type, per_rank: int, count: int, num_ranks: int
) -> None:
    schedule = Schedule.from_cells(stated(cls, num_ranks, count, "loop", per_rank))
    verify(schedule, chain_of(per_rank * num_ranks), num_microbatches=count)


@pytest.mark.parametrize(("per_rank", "count", "num_ranks"), SIZES)
@pytest.mark.parametrize("cls", [ScheduleZBVZeroBubble, ScheduleDualPipeV])
def test_orders_of_a_v_can_run_or_are_refused(
    cls: type, per_rank: int, count: int, num_ranks: int
) -> None:
    is_short = cls is ScheduleDualPipeV and count < per_rank * num_ranks
    if per_rank != 2 or is_short:
        with pytest.raises(ValueError):
            stated(cls, num_ranks, count, "loop", per_rank)
        return
    schedule = Schedule.from_cells(stated(cls, num_ranks, count, "v", per_rank))
    verify(schedule, chain_of(per_rank * num_ranks), num_microbatches=count)


def test_a_file_that_upstream_wrote_is_the_order_that_is_built(tmp_path: Path) -> None:
    schedule, _ = make(ScheduleDualPipeV, 4, 10, style="v", per_rank=2)
    for form in ("compute_only", "compute_comms"):
        schedule._dump_csv(str(tmp_path / form), form)
        assert Schedule.from_csv(tmp_path / form) == dualpipev(4, 10)


@pytest.mark.parametrize(
    ("text", "stage", "kind", "microbatch"),
    [("1F0", 1, "F", 0), ("2I1", 2, "I", 1), ("0W3", 0, "W", 3), ("0B3", 0, "B", 3)],
)
def test_actions_parse_to_what_prints_them(
    text: str, stage: int, kind: str, microbatch: int
) -> None:
    action = Action(stage=stage, kind=kind, microbatch=microbatch)
    assert Action.from_text(text) == action
    assert str(action) == text == str(_Action.from_str(text))


@pytest.mark.parametrize("text", ["1UNSHARD", "3RESHARD", "2SEND_B2", "1RECV_F1"])
def test_what_communicates_is_no_action(text: str) -> None:
    assert str(_Action.from_str(text)) == text
    with_text, without = (Schedule.from_cells([["0F0", *x]]) for x in ([text], []))
    assert with_text == without


@pytest.mark.parametrize(
    ("rows", "ranks_of_stages"),
    [
        (["0F0 0F1 . 0B0 . 0B1", ". 1F0 1B0 1F1 1B1 ."], (0, 1)),
        (V_ORDER.values(), (0, 1, 1, 0)),
        (LOWERED_V.values(), (0, 1, 1, 0)),
    ],
)
def test_an_order_that_upstream_lowered_is_the_same_order(
    rows: list[str], ranks_of_stages: tuple[int, ...]
) -> None:
    cells = [["" if x == "." else x for x in row.split()] for row in rows]
    lowered = _add_send_recv(
        {
            rank: _add_unshard_reshard([_Action.from_str(x) for x in row])
            for rank, row in enumerate(cells)
        },
        stage_to_rank=lambda stage: ranks_of_stages[stage],
        num_stages=len(ranks_of_stages),
    )
    found = Schedule.from_cells([str(x) for x in row] for row in lowered.values())
    assert found == Schedule.from_cells(cells)
    verify(found, chain_of(len(ranks_of_stages)))


@pytest.mark.parametrize(
    "rows", [["0F0 0B0", "1F0 1B0"], ["0F0 0I0 0W0", "1F0 1I0 1W0"]]
)
def test_a_valid_schedule(rows: list[str]) -> None:
    verify(Schedule.from_cells(row.split() for row in rows), chain_of(2))


@pytest.mark.parametrize("rows", [["0F0 0B0"], ["0F0", "1F0"]])
def test_a_rank_or_an_action_is_missing(rows: list[str]) -> None:
    schedule = Schedule.from_cells(row.split() for row in rows)
    with pytest.raises(ScheduleError):
        verify(schedule, chain_of(2), num_microbatches=1)
