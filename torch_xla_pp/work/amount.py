"""Amounts with a part that grows with the rows of a microbatch.

A *row* is an item of a batch's first dimension.
"""

import math
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """A number of bytes: some for each row, and a fixed part.

    Raises:
        ValueError: One of them is negative or no number.
    """

    bytes_per_row: float = 0.0
    bytes: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(
            bytes_per_row=self.bytes_per_row + other.bytes_per_row,
            bytes=self.bytes + other.bytes,
        )

    def of(self, rows: float) -> float:
        """Return the bytes for so many rows."""
        return self.bytes_per_row * rows + self.bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The FLOPs and bytes of one run of an operation.

    Args:
        flops_per_row: Floating-point operations for each row.
        flops: Those of a run, whatever its rows.
        bytes_per_row: Bytes that it reads from and writes to memory for each row.
        bytes: Those of a run, whatever its rows, such as its parameters.

    Raises:
        ValueError: One of them is negative or no number.
    """

    flops_per_row: float = 0.0
    flops: float = 0.0
    bytes_per_row: float = 0.0
    bytes: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            flops_per_row=self.flops_per_row + other.flops_per_row,
            flops=self.flops + other.flops,
            bytes_per_row=self.bytes_per_row + other.bytes_per_row,
            bytes=self.bytes + other.bytes,
        )

    def of(self, rows: float) -> tuple[float, float]:
        """Return the FLOPs and the bytes of a run with so many rows."""
        return (
            self.flops_per_row * rows + self.flops,
            self.bytes_per_row * rows + self.bytes,
        )


def _check(value: Any) -> None:
    """Refuse numbers that are negative or not finite, all at once."""
    numbers = {f.name: getattr(value, f.name) for f in fields(value)}
    faults = [
        f"{name}={number}"
        for name, number in numbers.items()
        if not (math.isfinite(number) and number >= 0)
    ]
    if faults:
        raise ValueError(
            f"{type(value).__name__.lower()}: expected finite numbers of at least 0, "
            f"got {', '.join(faults)}. Correct them."
        )
