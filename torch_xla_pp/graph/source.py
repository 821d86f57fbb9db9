"""The source of a stage's input."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_xla_pp.errors import PlanError


@dataclass(frozen=True, slots=True)
class Source:
    """An output of a stage, or an item of it.

    Args:
        stage: Index of the stage that makes it.
        key: Index, key or attribute of the item; None for the whole output.
    """

    stage: int
    key: int | str | None = None

    def __str__(self) -> str:
        item = "" if self.key is None else f"[{self.key!r}]"
        return f"output{item} of stage {self.stage}"

    def of(self, output: Any) -> Any:
        """Return the item of the stage's output that it names.

        Raises:
            PlanError: There is no such item.
        """
        if self.key is None:
            return output
        try:
            if isinstance(self.key, str) and not isinstance(output, Mapping):
                return getattr(output, self.key)
            return output[self.key]
        except (AttributeError, LookupError, TypeError) as error:
            raise PlanError(
                f"inputs_from: expected {self} to exist, got an output of type "
                f"{type(output).__name__} without it. Name an item that the stage "
                "returns."
            ) from error
