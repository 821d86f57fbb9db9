"""What the works of a model were measured to take on one device, in place of rooflines.

Terms: an *action* is one run of a program. Starting one takes `action_s`, whatever is
in it; what a work takes besides adds up over the works of a stage.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np

from torch_xla_pp import record
from torch_xla_pp.work import Work

_FORMAT = "torch_xla_pp costs 1"
# For how many times more or fewer rows than were measured times are taken to hold.
_FAR = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSeconds:
    """A time that grows with the rows of a microbatch.

    Args:
        seconds_per_row: Seconds for each row.
        seconds: Seconds besides, whatever the rows.

    Raises:
        ValueError: One is negative or no number.
    """

    seconds_per_row: float
    seconds: float

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not 0 <= value < math.inf:
                raise ValueError(
                    f"{entry.name}: expected a number of at least 0, got {value}. "
                    "Correct it."
                )

    def of(self, rows: float) -> float:
        """Return the seconds for so many rows."""
        return self.seconds_per_row * rows + self.seconds

    @classmethod
    def fitted(cls, rows: Sequence[int], seconds: Sequence[float]) -> "RowSeconds":
        """Return the line with the least squared errors that is nowhere negative.

        Args:
            rows: Rows that were measured.
            seconds: What each took.
        """
        mean_s = sum(seconds) / len(seconds)
        slope, offset = 0.0, mean_s
        if len(set(rows)) > 1:
            slope, offset = (float(x) for x in np.polyfit(rows, seconds, 1))
        if offset < 0:
            squares = sum(count * count for count in rows)
            pairs = zip(rows, seconds, strict=True)
            slope, offset = sum(count * s for count, s in pairs) / squares, 0.0
        if slope < 0:
            slope, offset = 0.0, mean_s
        return cls(seconds_per_row=max(0.0, slope), seconds=max(0.0, offset))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkSeconds:
    """What one kind of work takes.

    Args:
        digest: That of the works, see `Work.digest`.
        name: Name of one of them, for printing.
        forward: F.
        backward: B.
        backward_input: I.
        backward_weight: W.
    """

    digest: str
    name: str
    forward: RowSeconds
    backward: RowSeconds
    backward_input: RowSeconds
    backward_weight: RowSeconds


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """What the works of a model took on one device.

    Args:
        device: Name of the device.
        rows: Rows of the microbatches that were measured.
        action_s: What starting one program takes.
        works: Each kind of work once.

    Raises:
        ValueError: A figure makes no sense, or a kind is there twice.
    """

    device: str
    rows: tuple[int, ...]
    action_s: float
    works: tuple[WorkSeconds, ...]

    def __post_init__(self) -> None:
        faults = []
        if not 0 <= self.action_s < math.inf:
            faults.append(f"action_s: expected at least 0, got {self.action_s}.")
        if not self.rows or min(self.rows) < 1:
            faults.append(f"rows: expected counts of at least 1, got {self.rows}.")
        if len(self._of) < len(self.works):
            faults.append("works: expected each digest once, got one twice.")
        if faults:
            raise ValueError(
                "\n".join(f"costs: {fault} Correct it." for fault in faults)
            )

    @cached_property
    def _of(self) -> dict[str, WorkSeconds]:
        return {work.digest: work for work in self.works}

    def of(self, works: Sequence[Work]) -> list[WorkSeconds]:
        """Return what works take.

        Raises:
            ValueError: Something was not measured.
        """
        missing = [work.name for work in works if work.digest not in self._of]
        if missing:
            raise ValueError(
                f"costs: expected times of all works, got none for {len(missing)} of "
                f"{len(works)}: {', '.join(missing[:5])}. Measure the model that is "
                "planned, traced in the same way."
            )
        return [self._of[work.digest] for work in works]

    @property
    def range(self) -> tuple[int, int]:
        """Return the least and the most rows on a device that the times hold for."""
        return math.ceil(min(self.rows) / _FAR), max(self.rows) * _FAR

    def to_json(self, path: str | Path | None = None) -> str:
        """Return it as JSON.

        Args:
            path: A file to write as well.
        """
        return record.to_json(self, _FORMAT, path)

    @classmethod
    def from_json(cls, source: str | Path) -> "MeasuredCosts":
        """Read what `to_json` wrote.

        Args:
            source: A file, or the text itself, which is known by its line ends.

        Raises:
            ValueError: Fields are missing, unknown or faulty; all are named.
        """
        return record.from_json(cls, source, _FORMAT)
