"""The order in which a schedule of torch.distributed.pipelining runs its actions."""

from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from torch_xla_pp.runtime.torch_compat import Schedule as UpstreamSchedule
from torch_xla_pp.runtime.torch_compat import (
    ScheduleMulti,
    num_microbatches,
    num_stages,
    order_in_cells,
    runs_as,
)
from torch_xla_pp.schedule import Schedule, gpipe, one_f_one_b


def order_of(schedule: UpstreamSchedule) -> Schedule | None:
    """Return the actions of all ranks under `schedule`, None if they are not known.

    A schedule with several stages per rank has its actions in a table. One with a
    single stage per rank has them in its code: they are known of GPipe and 1F1B. The
    table that upstream 2.9 states for 1F1B is not what its code does, so it is not
    used.
    """
    if isinstance(schedule, ScheduleMulti):
        cells = order_in_cells(schedule)
        return Schedule.from_cells(cells) if cells else None
    if runs_as(schedule, ScheduleGPipe):
        return gpipe(num_stages(schedule), num_microbatches(schedule))
    if runs_as(schedule, Schedule1F1B):
        return one_f_one_b(num_stages(schedule), num_microbatches(schedule))
    return None
