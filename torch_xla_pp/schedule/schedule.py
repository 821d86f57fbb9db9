"""The order in which each rank runs its actions, as a value."""

import csv
import hashlib
import io
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch_xla_pp.record import text_of
from torch_xla_pp.schedule.action import Action, actions_in
from torch_xla_pp.schedule.grid import cells_of, format_grid
from torch_xla_pp.schedule.tasks import actions_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    r"""The actions of every rank, in the order in which the rank runs them.

    There are no sends or receives: they follow from the stages' edges. A schedule may
    still be wrong in itself, see `verify`.

    Args:
        actions: The actions of each rank.

    Example:
        >>> print(Schedule.from_csv("0F0,0B0\n1F0,1B0\n"))
        step  rank 0  rank 1
        0     0F0     1F0
        1     0B0     1B0

    Raises:
        TypeError: It is not a tuple of tuples of actions.
        ValueError: There is no rank.
    """

    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if not self.actions:
            raise ValueError(
                "schedule: expected the actions of at least one rank, got none. Write "
                "one row a rank."
            )
        for rank, row in enumerate(self.actions):
            if not isinstance(row, tuple):
                raise TypeError(
                    f"schedule, rank {rank}: expected a tuple of actions, got "
                    f"{type(row).__name__}. Convert it with tuple()."
                )
            for step, action in enumerate(row):
                if not isinstance(action, Action):
                    raise TypeError(
                        f"schedule, rank {rank}, step {step}: expected an Action, got "
                        f"{action!r}. Use Action.from_text for a text."
                    )

    def __str__(self) -> str:
        return format_grid(self.actions)

    @property
    def num_ranks(self) -> int:
        """Number of ranks, with or without actions."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """One more than the highest stage."""
        return 1 + max((a.stage for row in self.actions for a in row), default=-1)

    @property
    def num_microbatches(self) -> int:
        """One more than the highest microbatch."""
        return 1 + max((a.microbatch for row in self.actions for a in row), default=-1)

    @property
    def placement(self) -> dict[int, int]:
        """Stage → rank: the first one that has an action of the stage."""
        found: dict[int, int] = {}
        for rank, row in enumerate(self.actions):
            for action in row:
                found.setdefault(action.stage, rank)
        return dict(sorted(found.items()))

    def digest(self) -> str:
        """Return a text that differs for different schedules."""
        return hashlib.blake2b(self.to_csv().encode(), digest_size=8).hexdigest()

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that have an action on `rank`, ascending."""
        return tuple(sorted({action.stage for action in self.actions[rank]}))

    def with_backwards_at_once(self, stage: int) -> "Schedule":
        """Return the order in which backwards of a stage come right after forwards.

        Backwards of inputs count as well as full ones. It may not run to its end if the
        backwards wait for those of other stages.
        """

        def moved(row: tuple[Action, ...]) -> tuple[Action, ...]:
            places = {action: place for place, action in enumerate(row)}

            def place_of(action: Action) -> int:
                is_moved = action.stage == stage and action.kind in ("B", "I")
                forward = replace(action, kind="F") if is_moved else action
                return places.get(forward, places[action])

            return tuple(sorted(row, key=place_of))

        return Schedule(actions=tuple(map(moved, self.actions)))

    def whole_backwards(self, rank: int) -> frozenset[Action]:
        """Return the backwards of inputs that those of weights come right after."""
        return frozenset(
            first
            for first, then in itertools.pairwise(self.actions[rank])
            if first.kind == "I" and then == replace(first, kind="W")
        )

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return one line a rank, in the format of upstream's compute-only files.

        Args:
            path: A file to write as well.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([str(action) for action in row] for row in self.actions)
        if path is not None:
            Path(path).write_text(text.getvalue())
        return text.getvalue()

    @classmethod
    def from_cells(cls, rows: Iterable[Iterable[str]]) -> "Schedule":
        """Parse the cells of each rank, written as upstream does.

        Cells may be idle (blank), lowered (`1SEND_F0`, dropped) or overlapped
        (`(0F1;3B0)OVERLAP_F_B`, taken apart).

        Raises:
            ValueError: A cell holds something else; all of them are named.
        """
        actions: list[tuple[Action, ...]] = []
        faults = []
        for rank, row in enumerate(rows):
            found: list[Action] = []
            for number, cell in enumerate(row):
                try:
                    found += actions_in(cell)
                except ValueError as error:
                    faults.append(f"schedule, rank {rank}, cell {number}: {error}")
            actions.append(tuple(found))
        if faults:
            raise ValueError("\n".join(faults))
        return cls(actions=tuple(actions))

    @classmethod
    def from_csv(cls, source: str | Path) -> "Schedule":
        """Read a table with one line a rank: compute-only or lowered.

        Args:
            source: A file, or the table itself, which is known by its line ends.

        Raises:
            ValueError: A cell holds no action; all of them are named.
        """
        return cls.from_cells(csv.reader(io.StringIO(text_of(source))))

    @classmethod
    def from_text(cls, text: str) -> "Schedule":
        """Parse what `str` prints.

        Raises:
            ValueError: The text is not such a table.
        """
        return cls.from_cells(cells_of(text))

    @classmethod
    def from_tasks(cls, tasks: Iterable[Iterable[Any]]) -> "Schedule":
        """Convert JaxPP's form: one list of tasks for each rank.

        Args:
            tasks: Objects with the attributes `stage_id`, `mubatch_idx` and
                `fwd_or_bwd`, or triples (stage, microbatch, kind) with a kind of FWD,
                BWD, BWD_I, BWD_W or F, B, I, W. None is an idle slot; a tuple of
                tasks is taken apart.

        Raises:
            ValueError: A slot holds something else.
        """
        return cls(
            actions=tuple(
                tuple(action for task in row for action in actions_of(task))
                for row in tasks
            )
        )
