"""A schedule with indices for the checks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch_xla_pp.schedule.action import Action, Kind
from torch_xla_pp.schedule.schedule import Schedule
from torch_xla_pp.schedule.verify.faults import Fault

# Stage, kind and microbatch of an action; faster to look up than an `Action`.
ActionKey = tuple[int, Kind, int]


class Position(NamedTuple):
    """The place of an action: its rank, and its number there."""

    rank: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """The actions of a schedule, and where they are.

    Args:
        schedule: The schedule.
        at: The first place of each action.
        num_stages: Number of stages that there should be.
        num_microbatches: Number of microbatches that there should be.
        placement: Stage → rank where it should be.
    """

    schedule: Schedule
    at: Mapping[ActionKey, Position]
    num_stages: int
    num_microbatches: int
    placement: Mapping[int, int]

    def fault(self, key: ActionKey, text: str) -> Fault:
        """Report the first action of this key."""
        return fault_at(self.at[key], key, text)

    def backward_of(self, stage: int, microbatch: int) -> ActionKey:
        """Return the action that computes the gradients of a stage's inputs."""
        whole: ActionKey = (stage, "B", microbatch)
        return whole if whole in self.at else (stage, "I", microbatch)


def places_in(schedule: Schedule) -> Iterator[tuple[ActionKey, Position]]:
    """Yield all actions with their places, rank by rank."""
    for rank, row in enumerate(schedule.actions):
        for step, action in enumerate(row):
            yield (action.stage, action.kind, action.microbatch), Position(rank, step)


def first_places(schedule: Schedule) -> dict[ActionKey, Position]:
    """Return the first place of each action."""
    found: dict[ActionKey, Position] = {}
    for key, place in places_in(schedule):
        found.setdefault(key, place)
    return found


def action_of(key: ActionKey) -> Action:
    """Return the action of a key."""
    stage, kind, microbatch = key
    return Action(stage=stage, kind=kind, microbatch=microbatch)


def fault_at(place: Position, key: ActionKey, text: str) -> Fault:
    """Report the action `key` at one of its places."""
    return Fault(
        text=f"rank {place.rank}, step {place.step}: {action_of(key)}: {text}",
        rank=place.rank,
        step=place.step,
        action=action_of(key),
    )
