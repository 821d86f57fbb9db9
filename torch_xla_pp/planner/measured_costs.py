"""Measured times of a model's works on one device, in place of rooflines.

Terms: an *action* is one run of a program. Starting one takes `action_s`, whatever its
size; the further times of works add up over a stage.
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
# Times are assumed to hold for up to this many times more or fewer rows.
_FAR = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSeconds:
    """A time that grows with the rows of a microbatch.

    Args:
        seconds_per_row: Seconds for each row.
        seconds: Further seconds, whatever the rows.

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
    def added(cls, times: Sequence["RowSeconds"]) -> "RowSeconds":
        """Return the sum of several times."""
        return cls(
            seconds_per_row=math.fsum(time.seconds_per_row for time in times),
            seconds=math.fsum(time.seconds for time in times),
        )

    @classmethod
    def fitted(cls, rows: Sequence[int], seconds: Sequence[float]) -> "RowSeconds":
        """Return the line of least squares that is nowhere negative.

        Args:
            rows: Rows that were measured.
            seconds: Time of each.
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
    """The times of one kind of work.

    Args:
        digest: Digest of the works, see `Work.digest`.
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

    @classmethod
    def added(
        cls, works: Sequence["WorkSeconds"], digest: str, name: str
    ) -> "WorkSeconds":
        """Return what several works take together.

        Args:
            works: What each takes.
            digest: That of the joined work.
            name: Its name.
        """
        return cls(
            digest=digest,
            name=name,
            forward=RowSeconds.added([work.forward for work in works]),
            backward=RowSeconds.added([work.backward for work in works]),
            backward_input=RowSeconds.added([work.backward_input for work in works]),
            backward_weight=RowSeconds.added([work.backward_weight for work in works]),
        )


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """The measured or estimated times of a model's works on one device.

    Args:
        device: Name of the device.
        rows: Rows of the microbatches that were measured.
        action_s: Time to start a program.
        works: Each kind of work once.
        compiler: The compiler whose estimates these are; empty if works were run.

    Raises:
        ValueError: A figure makes no sense, or a kind is there twice.
    """

    device: str
    rows: tuple[int, ...]
    action_s: float
    works: tuple[WorkSeconds, ...]
    compiler: str = ""

    def __str__(self) -> str:
        rows = ", ".join(map(str, self.rows))
        if self.compiler:
            return f"compiled for {self.device} by {self.compiler} with {rows} rows"
        return f"measured on {self.device} with {rows} rows"

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
        """Return the times of works.

        Raises:
            ValueError: A work was not measured.
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
        """Return the least and the most rows on a device for which the times hold."""
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
