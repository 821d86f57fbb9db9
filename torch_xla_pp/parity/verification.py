"""The differences between a pipeline and the unsplit model, as values."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torch_xla_pp.text import table

Compared = Literal["parameter", "buffer", "output", "loss", "gradient"]

_KINDS: tuple[Compared, ...] = ("parameter", "buffer", "output", "loss", "gradient")
_MOST_LINES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One value of a pipeline compared with that of the unsplit model.

    Args:
        what: The kind of value.
        name: Its name in the model.
        largest: The model's largest absolute element.
        difference: The largest absolute difference of an element.
        scale: The number that the difference is relative to; at least `largest`.
        ratio: Ratio of the pipeline's value to the model's, by least squares: 4 for a
            gradient that was not divided by four microbatches.
        fault: Why they cannot be compared, empty if they can.
    """

    what: Compared
    name: str
    largest: float = math.nan
    difference: float = math.nan
    scale: float = math.nan
    ratio: float = math.nan
    fault: str = ""

    @classmethod
    def of(
        cls,
        what: Compared,
        name: str,
        got: Tensor | None,
        expected: Tensor | None,
        *,
        floor: float = 0.0,
    ) -> "Difference":
        """Compare two values on the host.

        Args:
            what: The kind of values.
            name: Their name.
            got: The pipeline's, None if it has none.
            expected: The model's, likewise.
            floor: The least scale: smaller values are rounding errors.
        """
        if got is None or expected is None:
            lacks = "pipeline" if got is None else "model"
            return cls(what=what, name=name, fault=f"the {lacks} has none")
        if got.shape != expected.shape:
            shapes = f"{[*got.shape]} instead of {[*expected.shape]}"
            return cls(what=what, name=name, fault=f"shape {shapes}")
        if not got.numel():
            return cls(what=what, name=name, largest=0, difference=0, scale=1, ratio=1)
        ours, wanted = (value.detach().double().flatten() for value in (got, expected))
        largest, square = float(wanted.abs().max()), float(wanted @ wanted)
        return cls(
            what=what,
            name=name,
            largest=largest,
            difference=float((ours - wanted).abs().max()),
            scale=max(largest, floor),
            ratio=float(ours @ wanted) / square if square else math.nan,
        )

    @property
    def relative(self) -> float:
        """Return the difference in proportion to the scale."""
        if self.fault:
            return math.inf
        if not self.scale:
            return math.inf if self.difference else 0.0
        return self.difference / self.scale


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The result of `verify`, the same on all ranks; prints as a table.

    Args:
        title: What was compared.
        differences: Every value that was compared.
        tolerance: The largest relative difference that counts as rounding.
        notes: What may explain the differences, a sentence each.
    """

    title: str
    differences: tuple[Difference, ...]
    tolerance: float
    notes: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """Return the values that differ by more than rounding, the worst first."""
        found = [d for d in self.differences if not d.relative <= self.tolerance]
        return tuple(sorted(found, key=_badness, reverse=True))

    @property
    def is_equal(self) -> bool:
        """Return whether nothing differs by more than rounding."""
        return not self.wrong

    def __str__(self) -> str:
        return "\n".join([*self._summary(), *self._culprits(), *self.notes])

    def _summary(self) -> list[str]:
        """Return a line for each kind of value."""
        rows = []
        for kind in _KINDS:
            own = [d for d in self.differences if d.what == kind]
            if own:
                worst = max(own, key=_badness)
                count = sum(d.what == kind for d in self.wrong)
                figures = [f"{len(own)}", f"{count}", f"{worst.relative:.1e}"]
                rows.append([f"{kind}s" if kind != "loss" else "losses", *figures])
                rows[-1].append(worst.name)
        header = ["", "compared", "wrong", "worst", "name"]
        return [self.title, *table(header, rows)]

    def _culprits(self) -> list[str]:
        """Return a line for each value that differs."""
        if self.is_equal:
            return [f"equal: nothing differs by more than {self.tolerance:.0e}"]
        rows = [
            [
                f"{d.what} {d.name}",
                f"{d.difference:.1e}",
                f"{d.largest:.1e}",
                f"{d.relative:.1e}",
                f"{d.ratio:.3g}",
                d.fault,
            ]
            for d in self.wrong[:_MOST_LINES]
        ]
        header = ["wrong", "difference", "largest", "relative", "ratio", ""]
        left = len(self.wrong) - len(rows)
        return [*table(header, rows), *([f"and {left} more"] if left else [])]


def largest_of(values: list[Tensor]) -> float:
    """Return the largest absolute element of all values, 0 if there is none."""
    found = [float(value.detach().abs().max()) for value in values if value.numel()]
    return max(found, default=0.0)


def default_tolerance(dtypes: set[torch.dtype]) -> float:
    """Return the tolerance for a model that computes in some dtypes.

    Both sides sum in their own order: a few hundred units of the last place, in units
    of the largest element.
    """
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    eps = max((torch.finfo(dtype).eps for dtype in floats), default=2**-23)
    return 8 * eps if eps > 1e-4 else 1000 * eps


def _badness(difference: Difference) -> float:
    """Return the sort key of a difference; one that is not a number comes first."""
    return math.inf if math.isnan(difference.relative) else difference.relative
