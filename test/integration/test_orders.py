"""The order of upstream's schedule objects."""

from typing import Any

import pytest
from schedule.upstream import make
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
)

from torch_xla_pp import ScheduleError
from torch_xla_pp.schedule import (
    Schedule,
    chain_of,
    dualpipev,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    verify,
    zb1p,
    zbv,
)
from torch_xla_pp.torch_compat import order_of

pytestmark = pytest.mark.pure


class Named1F1B(Schedule1F1B):
    """A user's class that keeps upstream's order."""


class OwnOrder(PipelineScheduleSingle):
    """A user's class with an order of its own."""

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("cls", "options", "order"),
    [
        (ScheduleGPipe, {}, gpipe(3, 6)),
        (Schedule1F1B, {}, one_f_one_b(3, 6)),
        (Named1F1B, {}, one_f_one_b(3, 6)),
        (ScheduleInterleaved1F1B, {"style": "loop"}, interleaved_1f1b(3, 6, 2)),
        (ScheduleInterleavedZeroBubble, {"style": "loop"}, zb1p(3, 6, 2)),
        (ScheduleZBVZeroBubble, {"style": "v"}, zbv(3, 6)),
        (ScheduleDualPipeV, {"style": "v"}, dualpipev(3, 6)),
        (OwnOrder, {}, None),
        (PipelineScheduleMulti, {"style": "loop"}, None),
    ],
)
def test_the_order_of_a_schedule_is_told(
    cls: type, options: dict[str, Any], order: Schedule | None
) -> None:
    per_rank = 2 if options else 1
    schedule, _ = make(cls, 3, 6, per_rank=per_rank, **options)
    assert order_of(schedule) == order


def test_looped_bfs_can_run() -> None:
    schedule, _ = make(ScheduleLoopedBFS, 3, 6, style="loop", per_rank=2)
    order = order_of(schedule)
    assert order is not None
    verify(order, chain_of(6), num_microbatches=6, max_live=6)


def test_upstreams_statement_of_1f1b_is_not_what_it_runs() -> None:
    """If this fails, upstream is corrected, and `order_of` may read what it states."""
    schedule, _ = make(Schedule1F1B, 3, 6)
    stated = schedule.pipeline_order
    cells = [["" if a is None else str(a) for a in stated[r]] for r in range(3)]
    with pytest.raises(ScheduleError, match="microbatch 0: .* got B") as error:
        verify(Schedule.from_cells(cells), chain_of(3), num_microbatches=6)
    assert "2F6: expected microbatches 0..5, got 6" in str(error.value)
