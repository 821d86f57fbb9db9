"""What a stage holds on each device during a step.

Counted is what lies between two programs: parameters, buffers, gradients, and what
microbatches wait with. Not counted is what a program needs while it runs, and messages
that have arrived before the program that receives them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.mesh import parse_sharding

Kind = Literal["saved", "residual", "loss", "output"]
"""What a microbatch waits with.

* "saved": what its forward saved for its backward
* "residual": what its backward of inputs left for that of weights
* "loss": the gradient of its loss
* "output": the stage's output, which the schedule returns at the end of the step
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """State the most that a stage held on one device in a step.

    Args:
        num_live: Microbatches between their forward and the end of their backward.
        saved_bytes: Saved values of those microbatches, and outputs that were kept.
        state_bytes: Parameters, buffers and gradients.
    """

    num_live: int
    saved_bytes: int
    state_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Return all that was held at most."""
        return self.saved_bytes + self.state_bytes

    def __str__(self) -> str:
        peak, state, saved = (
            f"{count / 2**20:.1f}"
            for count in (self.peak_bytes, self.state_bytes, self.saved_bytes)
        )
        return (
            f"{peak} MiB on a device: {state} of parameters, buffers and gradients, "
            f"{saved} saved by up to {self.num_live} microbatches"
        )


class Sizes:
    """Know the bytes that values take on one device, by name.

    Looking at a value takes microseconds, so each name is looked at once: the values of
    one set of programs always look alike.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def total(self, values: Mapping[str, Tensor]) -> int:
        """Return the bytes of all `values`."""
        new = [name for name in values if name not in self._bytes]
        if new:
            found = device_bytes([values[name] for name in new])
            self._bytes.update(zip(new, found, strict=True))
        return sum(map(self._bytes.__getitem__, values))


class Shelf:
    """Keep what microbatches wait with, and count its bytes on one device.

    Attributes:
        most_bytes: The most bytes that lay here since the last `clear`.
        most_live: The most microbatches that waited for their backward.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[Kind, int], dict[str, Tensor]] = {}
        self._bytes: dict[tuple[Kind, int], int] = {}
        self.clear()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def num_bytes(self) -> int:
        """Return how many bytes lie here now."""
        return self._total

    def clear(self) -> None:
        """Drop everything and count anew."""
        self._values.clear()
        self._bytes.clear()
        self._total = self._num_live = 0
        self.most_bytes = self.most_live = 0

    def put(
        self, kind: Kind, microbatch: int, values: dict[str, Tensor], sizes: Sizes
    ) -> None:
        """Keep the values of a microbatch until they are taken."""
        key = (kind, microbatch)
        self._values[key] = values
        self._bytes[key] = sizes.total(values)
        self._total += self._bytes[key]
        self._num_live += kind == "saved"
        self.most_bytes = max(self.most_bytes, self._total)
        self.most_live = max(self.most_live, self._num_live)

    def has(self, kind: Kind, microbatch: int) -> bool:
        """Return whether there is something to take."""
        return (kind, microbatch) in self._values

    def take(self, kind: Kind, microbatch: int) -> dict[str, Tensor]:
        """Hand values out; they are kept no more."""
        key = (kind, microbatch)
        self._total -= self._bytes.pop(key)
        self._num_live -= kind == "saved"
        return self._values.pop(key)


def device_bytes(tensors: list[Tensor]) -> list[int]:
    """Return how many bytes of each tensor lie on one device."""
    found = []
    for tensor, text in zip(tensors, xla_compat.sharding_texts(tensors), strict=True):
        shape = parse_sharding(text).shard_shape(tensor.shape) if text else tensor.shape
        found.append(math.prod(shape) * tensor.element_size())
    return found
