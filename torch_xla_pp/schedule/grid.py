"""Tables of actions as text: one line a step, one column a rank."""

from collections.abc import Sequence
from itertools import zip_longest

from torch_xla_pp.schedule.action import Action

IDLE = "."
_ARROW = " <--"
_NEAR = 10


def format_grid(
    rows: Sequence[Sequence[Action]], mark: tuple[int, int] | None = None
) -> str:
    """Return a table in which line `step` holds the rank's action number `step`.

    Args:
        rows: The actions of each rank.
        mark: Rank and step of an action to point at. Of a long table only the steps
            near it are shown.
    """
    cells = [[str(action) for action in row] for row in rows]
    if mark is not None:
        rank, step = mark
        cells[rank][step] += _ARROW
    steps = list(zip_longest(*cells, fillvalue=IDLE))
    first, last = _range_shown(len(steps), mark)
    shown = [[str(step), *steps[step]] for step in range(first, last)]
    header = ["step", *[f"rank {rank}" for rank in range(len(cells))]]
    lines = _aligned([header, *shown])
    if first > 0:
        lines.insert(1, "...")
    if last < len(steps):
        lines.append("...")
    return "\n".join(lines)


def cells_of(text: str) -> list[list[str]]:
    """Parse what `format_grid` prints without a mark; idle cells are left out.

    Raises:
        ValueError: The text is no such table.
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if not lines or lines[0][0] != "step":
        raise ValueError(
            "schedule: expected a table that begins with 'step  rank 0', got "
            f"{text[:40]!r}. Pass what str() of a schedule gives, or use from_csv."
        )
    num_ranks = lines[0].count("rank")
    for line in lines[1:]:
        if len(line) != num_ranks + 1:
            raise ValueError(
                f"schedule, step {line[0]}: expected {num_ranks} cells, got "
                f"{len(line) - 1}. Write {IDLE!r} where a rank is idle."
            )
    rows = [[line[rank + 1] for line in lines[1:]] for rank in range(num_ranks)]
    return [[cell for cell in row if cell != IDLE] for row in rows]


def _range_shown(num_steps: int, mark: tuple[int, int] | None) -> tuple[int, int]:
    if mark is None:
        return 0, num_steps
    return max(0, mark[1] - _NEAR), min(num_steps, mark[1] + _NEAR + 1)


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    return [line.rstrip() for line in padded]
