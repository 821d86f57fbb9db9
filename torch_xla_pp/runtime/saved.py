"""Saved activations, and all else that a stage holds between two programs."""

from typing import Literal

from torch import Tensor

from torch_xla_pp.compile import Sizes

SavedKind = Literal["saved", "residual", "output", "loss", "kept"]
"""What a microbatch waits with.

* "saved": what its forward saved for its backward
* "residual": what its backward of inputs left for that of weights
* "output": the stage's output, of which its loss is yet to be computed
* "loss": the gradient of its loss
* "kept": the stage's output, which the schedule returns at the end of the step
"""


class SavedValues:
    """What microbatches wait with, and its bytes on one device.

    Attributes:
        most_bytes: The most bytes that were held since the last `clear`.
        most_active_bytes: The most while a program ran, with what it took.
        most_live: The most microbatches that waited for their backward.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[SavedKind, int], dict[str, Tensor]] = {}
        self._bytes: dict[tuple[SavedKind, int], int] = {}
        self.clear()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def num_bytes(self) -> int:
        """Return how many bytes are held now."""
        return self._total

    def clear(self) -> None:
        """Drop everything and count anew."""
        self._values.clear()
        self._bytes.clear()
        self._total = self._taken = self._num_live = 0
        self.most_bytes = self.most_active_bytes = self.most_live = 0

    def put(
        self, kind: SavedKind, microbatch: int, values: dict[str, Tensor], sizes: Sizes
    ) -> None:
        """Keep the values of a microbatch until they are taken."""
        key = (kind, microbatch)
        self._values[key] = values
        self._bytes[key] = sizes.total(values)
        self._total += self._bytes[key]
        self._num_live += kind == "saved"
        self.most_bytes = max(self.most_bytes, self._total)
        self.most_live = max(self.most_live, self._num_live)

    def has(self, kind: SavedKind, microbatch: int) -> bool:
        """Return whether there is something to take."""
        return (kind, microbatch) in self._values

    def take(self, kind: SavedKind, microbatch: int) -> dict[str, Tensor]:
        """Return values and keep them no more, but for the next program."""
        key = (kind, microbatch)
        num_bytes = self._bytes.pop(key)
        self._total -= num_bytes
        self._taken += num_bytes
        self._num_live -= kind == "saved"
        return self._values.pop(key)

    def note_run(self, extra_bytes: int) -> None:
        """Count a program that reads what was taken since the last one.

        Args:
            extra_bytes: What it needs of its own on a device.
        """
        active = self._total + self._taken + extra_bytes
        self.most_active_bytes = max(self.most_active_bytes, active)
        self._taken = 0
