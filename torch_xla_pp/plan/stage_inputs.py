"""The sources of a stage's arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch_xla_pp.graph import Source

SourceLike: TypeAlias = int | tuple[int, int | str] | Source

InputsFrom: TypeAlias = Sequence[SourceLike] | Mapping[str, SourceLike]
"""Sources of positional arguments, or of keyword arguments by name.

`2` is the whole output of stage 2; `(2, 0)` is its first item, and `(2, "mask")` its
item of that key or its attribute of that name.
"""


@dataclass(frozen=True, slots=True)
class StageInputs:
    """The sources of a stage's arguments, without those of the batch.

    Args:
        args: Sources of the first positional arguments.
        kwargs: Sources of keyword arguments.
        is_spread: Whether the items of a tuple or list are arguments of their own, as
            upstream passes the output of the previous stage on.
    """

    args: tuple[Source, ...] = ()
    kwargs: tuple[tuple[str, Source], ...] = ()
    is_spread: bool = False

    @classmethod
    def of(cls, stage: int, inputs_from: InputsFrom | None) -> "StageInputs":
        """Return the inputs of a stage; None stands for the previous stage's outputs.

        Raises:
            ValueError: An item is not a source, or is not made before the stage.
        """
        if inputs_from is None:
            previous = () if stage == 0 else (Source(stage - 1),)
            return cls(previous, is_spread=True)
        if isinstance(inputs_from, Mapping):
            named = ((n, _source(stage, x)) for n, x in inputs_from.items())
            return cls((), tuple(named))
        return cls(tuple(_source(stage, x) for x in inputs_from))

    @property
    def sources(self) -> tuple[Source, ...]:
        """Return all sources, those of positional arguments first."""
        return (*self.args, *(source for _, source in self.kwargs))

    def arguments(
        self, outputs: Mapping[int, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put the arguments together.

        Args:
            outputs: Stage → its output, for every stage that is a source.
        """
        args = tuple(source.of(outputs[source.stage]) for source in self.args)
        if self.is_spread and args and isinstance(args[0], (tuple, list)):
            args = tuple(args[0])
        return args, {name: s.of(outputs[s.stage]) for name, s in self.kwargs}


def _source(stage: int, value: Any) -> Source:
    match value:
        case int() if not isinstance(value, bool):
            source = Source(value)
        case (int() as origin, int() | str() as key):
            source = Source(origin, key)
        case Source():
            source = value
        case _:
            raise ValueError(
                f"inputs_from: expected stage indices or pairs of a stage index and an "
                f"item, got {value!r}. Pass e.g. [0, (1, 'mask')]."
            )
    if not 0 <= source.stage < stage:
        raise ValueError(
            f"inputs_from: expected stages before stage {stage}, got {source.stage}. "
            "Number the stages so that values go from lower to higher ones."
        )
    return source
