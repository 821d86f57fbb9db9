"""What the ranks have of a model, by the names that it has there.

Terms: a *name* is that of the unsplit model. A tied parameter has several, of which the
*first* stands for all; only its owner, the first stage that has the parameter, writes
it. In each replica but the first, buffers are the replica's own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from torch_xla_pp.errors import CheckpointError
from torch_xla_pp.graph import original_name


class SavedStage(Protocol):
    """A stage as a checkpoint needs it, see `PipelineStage`."""

    submod: nn.Module
    stage_index: int
    num_steps: int

    @property
    def tied(self) -> dict[str, str]:
        """Return the group of each parameter that other stages have copies of."""

    @property
    def replica(self) -> tuple[int, int]:
        """Return which replica of the pipeline this is, and of how many."""


class Held(NamedTuple):
    """A value that a stage has under a name.

    Attributes:
        stage: Index of the stage.
        shape: Of the tensor; None of other values.
        group: What is equal for names of one parameter, "" if it has one name alone.
    """

    stage: int
    shape: tuple[int, ...] | None
    group: str


def values_of(stage: SavedStage) -> dict[str, Any]:
    """Return parameters, buffers and extra state of a stage by name."""
    found: dict[str, Any] = {}
    for name, value in stage.submod.state_dict(keep_vars=True).items():
        # Calls after the first of a module have names of their own in a trace.
        found.setdefault(original_name(name), value)
    return found


def held_by(stage: SavedStage) -> dict[str, Held]:
    """Describe the values of a stage, for the other ranks."""
    values = values_of(stage)
    groups = {original_name(name): group for name, group in stage.tied.items()}
    names: dict[int, list[str]] = {}
    for name, value in values.items():
        if isinstance(value, nn.Parameter):
            names.setdefault(id(value), []).append(name)

    def group_of(name: str, value: Any) -> str:
        own = names.get(id(value), [name])
        tie = next((groups[other] for other in own if other in groups), "")
        return tie or (own[0] if len(own) > 1 else "")

    return {
        name: Held(
            stage.stage_index,
            tuple(value.shape) if isinstance(value, Tensor) else None,
            group_of(name, value),
        )
        for name, value in values.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The names of a whole model.

    Args:
        shapes: Name → shape, None for what is no tensor.
        first: Further name of a tied parameter → its first one.
        owners: Name → index of the first stage that has it.
    """

    shapes: dict[str, tuple[int, ...] | None]
    first: dict[str, str] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, stages: Iterable[dict[str, Held]]) -> "Names":
        """Join the values of all stages.

        Raises:
            CheckpointError: Two stages have something under one name that is not one
                parameter.
        """
        by_stage = sorted(_each(stages), key=lambda item: item[1].stage)
        names = cls(shapes={})
        groups: dict[str, str] = {}
        kinds: dict[str, Held] = {}
        faults: dict[str, None] = {}
        for name, held in by_stage:
            known = kinds.setdefault(name, held)
            if known.stage != held.stage and not known.group == held.group != "":
                where = f"stages {known.stage} and {held.stage}"
                faults[f"{name} is something of its own in {where}"] = None
            names.shapes.setdefault(name, held.shape)
            names.owners.setdefault(name, held.stage)
            first = groups.setdefault(held.group, name) if held.group else name
            if first != name:
                names.first[name] = first
        if faults:
            raise CheckpointError(
                "checkpoint: expected every part of a model under a name of its own, "
                f"got: {'; '.join(faults)}. Give parts of stages the names that they "
                "have in the whole model, and name tied parameters in tied."
            )
        return names

    def first_of(self, name: str) -> str:
        """Return the first name of a parameter."""
        return self.first.get(name, name)

    def all_of(self, name: str) -> list[str]:
        """Return all names of a parameter, the given one first."""
        first = self.first_of(name)
        others = [alias for alias, own in self.first.items() if own == first]
        return list(dict.fromkeys([name, first, *others]))


def _each(stages: Iterable[dict[str, Held]]) -> Iterator[tuple[str, Held]]:
    for part in stages:
        yield from part.items()


def names_of(stages: Sequence[SavedStage]) -> dict[int, tuple[int, str]]:
    """Return id of each parameter → its stage and its name there."""
    return {
        id(value): (stage.stage_index, name)
        for stage in stages
        for name, value in reversed([*values_of(stage).items()])
        if isinstance(value, nn.Parameter)
    }
