"""Actions of a rank in a step: each is one program for one microbatch.

Terms: the *kind* of an action is F (forward), B (whole backward), I (the part of the
backward that gives the gradients of inputs) or W (the part that gives those of
weights). Actions print and parse as in torch.distributed.pipelining: `2F0` is the
forward of stage 2 for microbatch 0.
"""

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_LOWERED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]\d+)")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One kind of program of a stage, for one microbatch.

    Example:
        >>> str(Action(stage=2, kind="F", microbatch=0))
        '2F0'

    Raises:
        ValueError: An index is negative, or the kind is unknown.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __post_init__(self) -> None:
        if self.stage < 0 or self.microbatch < 0 or self.kind not in KINDS:
            raise ValueError(
                "action: expected a stage and a microbatch that count from 0 and a "
                f"kind of {', '.join(KINDS)}, got stage {self.stage}, microbatch "
                f"{self.microbatch}, kind {self.kind!r}. Correct what makes it."
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def from_text(cls, text: str) -> "Action":
        """Parse what `str` prints.

        Raises:
            ValueError: The text is not an action.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"action: expected stage, kind and microbatch such as 2F0, got {text!r}"
                f". Kinds are {', '.join(KINDS)}."
            )
        stage, kind, microbatch = match.groups()
        return cls(stage=int(stage), kind=cast(Kind, kind), microbatch=int(microbatch))


def actions_in(cell: str) -> tuple[Action, ...]:
    """Return the actions in one cell of a table as upstream writes it.

    An idle cell has none. Neither do sends, receives and the like of a lowered table
    have one: communication follows from the data. Actions that upstream overlaps are
    returned in the order in which it runs them.

    Raises:
        ValueError: The cell holds something else.
    """
    text = cell.strip()
    if not text or _LOWERED.fullmatch(text):
        return ()
    overlapped = _OVERLAPPED.fullmatch(text)
    if overlapped is None:
        return (Action.from_text(text),)
    return tuple(Action.from_text(part) for part in overlapped[1].split(";"))
