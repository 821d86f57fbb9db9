"""Tables of actions as text: one line a step, one column a rank."""

from collections.abc import Sequence
from itertools import zip_longest

from torch_xla_pp.schedule.action import Action

IDLE = "."
_ARROW = " <--"
_NEAR = 10
_MANY = 40


def format_grid(rows: Sequence[Sequence[Action]]) -> str:
    """Return a table in which line `step` holds the rank's action number `step`.

    Args:
        rows: The actions of each rank.
    """
    steps = _steps_of([[str(action) for action in row] for row in rows])
    return "\n".join(_aligned([_header(len(rows)), *steps]))


def format_culprit(
    rows: Sequence[Sequence[Action]], rank: int | None, step: int | None
) -> str:
    """Return the table with an arrow at one action, if it is in the table.

    Of a long table only the steps near the action are shown, or the first ones.
    """
    cells = [[str(action) for action in row] for row in rows]
    if rank is not None and step is not None:
        cells[rank][step] += _ARROW
    steps = _steps_of(cells)
    if len(steps) <= _MANY:
        return "\n".join(_aligned([_header(len(rows)), *steps]))
    first = max(0, (step or 0) - _NEAR)
    last = first + 2 * _NEAR + 1
    lines = _aligned([_header(len(rows)), *steps[first:last]])
    if first > 0:
        lines.insert(1, "...")
    if last < len(steps):
        lines.append("...")
    return "\n".join(lines)


def cells_of(text: str) -> list[list[str]]:
    """Parse what `format_grid` prints; idle cells are left out.

    Raises:
        ValueError: The text is not such a table.
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


def _header(num_ranks: int) -> list[str]:
    return ["step", *(f"rank {rank}" for rank in range(num_ranks))]


def _steps_of(cells: Sequence[Sequence[str]]) -> list[list[str]]:
    """Turn the cells of each rank into numbered lines of one step each."""
    steps = zip_longest(*cells, fillvalue=IDLE)
    return [[str(number), *step] for number, step in enumerate(steps)]


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    return [line.rstrip() for line in padded]
