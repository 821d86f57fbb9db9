"""Medians of rounds, and their quartiles beside them."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def medians_of(rounds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the median of each figure, and its quartiles as `<figure>_spread`.

    Args:
        rounds: Figure → its value in each round; a single one is its own quartiles.
    """
    row: dict[str, Any] = {}
    for name, values in rounds.items():
        several = values if len(values) > 1 else 2 * values
        first, row[name], third = statistics.quantiles(several, n=4)
        row[f"{name}_spread"] = (first, third)
    return row


def text_of(
    row: Mapping[str, Any], name: str, form: str = ".2f", scale: float = 1.0
) -> str:
    """Return a figure of such a row, as "0.29 (0.28 to 0.31)".

    Args:
        row: Figures with their quartiles.
        name: The figure.
        form: The format of each number.
        scale: What each number is multiplied with.
    """
    middle, first, third = (
        f"{value * scale:{form}}" for value in (row[name], *row[f"{name}_spread"])
    )
    return f"{middle} ({first} to {third})"


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio of two figures in each round."""
    return [one / other for one, other in zip(values, others, strict=True)]


def sums(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Return the sum over ranks of what each of them has for each round."""
    return [sum(values) for values in zip(*rounds, strict=True)]
