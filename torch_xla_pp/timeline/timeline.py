"""The timeline of all ranks in one step."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch_xla_pp.timeline.span import Span, Transfer

_FORMAT = "torch_xla_pp timeline 1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The actions and messages of ranks in one step, on one clock.

    Args:
        num_ranks: Number of ranks, with or without spans.
        spans: Their actions; kept in the order of ranks, then of start times.
        transfers: Their messages; kept in the order of sending.
        peak_bytes: The peak of values that each rank saved for backwards, on one
            device; empty if unknown.

    Raises:
        ValueError: There is no rank, or a span or transfer has an unknown rank.
    """

    num_ranks: int
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...] = ()
    peak_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check_ranks()
        if len(self.peak_bytes) not in (0, self.num_ranks):
            raise ValueError(
                f"timeline: expected peak_bytes of all {self.num_ranks} ranks or none, "
                f"got {len(self.peak_bytes)}. Give one number for each rank."
            )
        spans = sorted(self.spans, key=attrgetter("rank", "start_s", "end_s"))
        transfers = sorted(self.transfers, key=attrgetter("sent_s"))
        object.__setattr__(self, "spans", tuple(spans))
        object.__setattr__(self, "transfers", tuple(transfers))

    def _check_ranks(self) -> None:
        named = {span.rank for span in self.spans}
        named.update(t.sender_rank for t in self.transfers)
        named.update(t.receiver_rank for t in self.transfers)
        unknown = sorted(rank for rank in named if not 0 <= rank < self.num_ranks)
        if self.num_ranks < 1 or unknown:
            raise ValueError(
                "timeline: expected at least one rank, and spans and transfers of "
                f"ranks 0..{self.num_ranks - 1}, got ranks {unknown}. Count all ranks "
                "of the step."
            )

    @property
    def start_s(self) -> float:
        """Return when the first action began; 0 if there is none."""
        return min((span.start_s for span in self.spans), default=0.0)

    @property
    def end_s(self) -> float:
        """Return when the last action ended; 0 if there is none."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def step_s(self) -> float:
        """Return the time from the first start to the last end."""
        return self.end_s - self.start_s

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """Return the actions of a rank, in order."""
        return tuple(span for span in self.spans if span.rank == rank)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the timeline as JSON, which `from_json` reads.

        Args:
            path: A file to write as well.
        """
        text = json.dumps(
            {
                "format": _FORMAT,
                "num_ranks": self.num_ranks,
                "spans": _columns(Span, self.spans),
                "transfers": _columns(Transfer, self.transfers),
                "peak_bytes": self.peak_bytes,
            }
        )
        if path is not None:
            Path(path).write_text(text)
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> "Timeline":
        """Read what `to_json` wrote.

        Args:
            source: A file, or the text itself, which is known by its first brace.

        Raises:
            ValueError: It is not a timeline.
        """
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        text = str(source) if is_text else Path(source).read_text()
        try:
            return cls._from_fields(json.loads(text))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"timeline: expected JSON of format {_FORMAT!r}, got {text[:40]!r}. "
                "Pass what Timeline.to_json wrote."
            ) from error

    @classmethod
    def _from_fields(cls, found: dict[str, Any]) -> "Timeline":
        if found["format"] != _FORMAT:
            raise KeyError(found["format"])
        return cls(
            num_ranks=found["num_ranks"],
            spans=tuple(Span(**row) for row in _rows(found["spans"])),
            transfers=tuple(Transfer(**row) for row in _rows(found["transfers"])),
            peak_bytes=tuple(found["peak_bytes"]),
        )


def _columns(kind: type, values: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the values' fields, each as one list."""
    return {f.name: [getattr(v, f.name) for v in values] for f in fields(kind)}


def _rows(columns: dict[str, list[Any]]) -> Iterable[dict[str, Any]]:
    """Return the argument of `_columns`, each value as its fields."""
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]
