"""The faults of a schedule, and the error that lists them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch_xla_pp.errors import ScheduleError
from torch_xla_pp.schedule.action import Action
from torch_xla_pp.schedule.grid import format_culprit
from torch_xla_pp.schedule.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault of a schedule.

    Args:
        text: What was expected, what was found, and what to do.
        rank: The rank that it concerns, None if there is none.
        step: Number of the culprit among the rank's actions, None if it is missing.
        action: The culprit.
    """

    text: str
    rank: int | None = None
    step: int | None = None
    action: Action | None = None


def refuse(schedule: Schedule, faults: Sequence[Fault]) -> None:
    """Raise an error that lists all faults, if there are any.

    Raises:
        ScheduleError: With rank, step and action of the first culprit in the table.
    """
    if not faults:
        return
    first = next((fault for fault in faults if fault.step is not None), faults[0])
    count = f"{len(faults)} fault" + ("s" if len(faults) > 1 else "")
    lines = [f"schedule: expected one that can run, got {count}:"]
    lines += [f"  {fault.text}" for fault in faults]
    raise ScheduleError(
        "\n".join([*lines, format_culprit(schedule.actions, first.rank, first.step)]),
        rank=first.rank,
        step=first.step,
        action=None if first.action is None else str(first.action),
    )
