"""Saved activations, and all else that a stage holds on a device during a step.

Counted are parameters, buffers, gradients, what optimizers keep for the parameters,
what microbatches wait with, and what the program that runs needs beside its arguments.
Programs of a device run one after another, in the order in which they were enqueued, so
all of that is known when they are enqueued. Not counted are the batch, what
programs other than the stage's need (an optimizer's, say), and messages that have
arrived before the program that receives them.
"""

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from torch_xla_pp.compile import device_bytes

SavedKind = Literal["saved", "residual", "output", "loss", "kept"]
"""What a microbatch waits with.

* "saved": what its forward saved for its backward
* "residual": what its backward of inputs left for that of weights
* "output": the stage's output, of which its loss is yet to be computed
* "loss": the gradient of its loss
* "kept": the stage's output, which the schedule returns at the end of the step
"""


def total_bytes(values: Mapping[str, Tensor], sizes: dict[str, int]) -> int:
    """Return the bytes of values on one device.

    Looking at a value takes microseconds, so each name is looked at once: the values of
    one set of programs always look alike.

    Args:
        values: By name.
        sizes: The bytes of those that are known; others are added.
    """
    new = [name for name in values if name not in sizes]
    if new:
        found = device_bytes([values[name] for name in new])
        sizes.update(zip(new, found, strict=True))
    return sum(map(sizes.__getitem__, values))


class SavedValues:
    """A stage's saved activations and the like, and their bytes on one device.

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
        """Drop everything and count afresh."""
        self._values.clear()
        self._bytes.clear()
        self._total = self._taken = self._num_live = 0
        self.most_bytes = self.most_active_bytes = self.most_live = 0

    def put(
        self,
        kind: SavedKind,
        microbatch: int,
        values: dict[str, Tensor],
        sizes: dict[str, int],
    ) -> None:
        """Keep the values of a microbatch until they are taken; `sizes` is for them."""
        key = (kind, microbatch)
        self._values[key] = values
        self._bytes[key] = total_bytes(values, sizes)
        self._total += self._bytes[key]
        self._num_live += kind == "saved"
        self.most_bytes = max(self.most_bytes, self._total)
        self.most_live = max(self.most_live, self._num_live)

    def has(self, kind: SavedKind, microbatch: int) -> bool:
        """Return whether there is something to take."""
        return (kind, microbatch) in self._values

    def take(self, kind: SavedKind, microbatch: int) -> dict[str, Tensor]:
        """Return values, which count only until the next program has run."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """The most that a stage held on one device in a step.

    Args:
        num_live: Microbatches between their forward and the end of their backward.
        saved_bytes: The most that was held between two programs: saved values of those
            microbatches, gradients of losses, and outputs that were kept.
        state_bytes: Parameters, buffers, gradients and their sums.
        active_bytes: The most that was held while a program ran, and all that this
            program takes: its temporaries and results.
        optimizer_bytes: What optimizers keep for the parameters now.
    """

    num_live: int
    saved_bytes: int
    state_bytes: int
    active_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Return all that was held at most."""
        running = max(self.active_bytes, self.saved_bytes)
        return self.state_bytes + self.optimizer_bytes + running

    def __str__(self) -> str:
        peak, state, optimizer, active, saved = (
            f"{count / 2**20:.1f}"
            for count in (
                self.peak_bytes,
                self.state_bytes,
                self.optimizer_bytes,
                max(self.active_bytes, self.saved_bytes),
                self.saved_bytes,
            )
        )
        return (
            f"{peak} MiB on a device: {state} of parameters, buffers and gradients, "
            f"{optimizer} of optimizers, {active} in programs and between them, where "
            f"up to {self.num_live} microbatches saved {saved}"
        )


def optimizer_bytes(parameters: Iterable[Tensor]) -> int:
    """Return what all optimizers of this process keep for parameters on one device.

    Looks at every object of the process for that, which takes a tenth of a second.
    """
    optimizers = [x for x in gc.get_objects() if issubclass(type(x), Optimizer)]
    kept = [
        value
        for parameter in parameters
        for optimizer in optimizers
        if parameter in optimizer.state
        for value in tree_leaves(optimizer.state[parameter])
    ]
    on_device = [x for x in kept if isinstance(x, Tensor) and x.device.type == "xla"]
    return sum(device_bytes(on_device))
