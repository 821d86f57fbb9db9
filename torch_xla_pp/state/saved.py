"""Saved activations, and all else that a stage holds on a device during a step.

Counted are parameters, buffers, gradients, what optimizers keep for the parameters,
what microbatches wait with, and what the program that runs needs beside its arguments.
Programs of a device run one after another, in the order in which they were enqueued, so
all of that is known when they are enqueued. Not counted are the batch, what
programs other than the stage's need (an optimizer's, say), and messages that have
arrived before the program that receives them.

A value is *small* if its memory stays with the process when it is freed, as on CPU
devices. It is freed late there: the program behind the one that has read it takes its
memory before. So what is held at most is the most of small values, at any time, and of
large ones.
"""

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

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


class Size(NamedTuple):
    """What values take on one device.

    Attributes:
        num_bytes: All of them.
        small_bytes: Those that are small.
    """

    num_bytes: int
    small_bytes: int


class HeldBytes:
    """What lies on a device as programs are enqueued, in bytes, and the most of it.

    Attributes:
        num_bytes: How many are held now.
        most_live: The most microbatches that waited for their backward.
        most_saved: The most bytes that were held at once, but for what is passed on.
        most_passed: The most that backwards of inputs passed on to those of weights.
        most_held: The most bytes that were held at once.
    """

    def __init__(self) -> None:
        # Of microbatches, and of bytes.
        self._live = self._passed = self._taken = 0
        # Of small values: held, taken for the next program, read by the last one.
        self._small = self._small_taken = self._small_read = 0
        # What the last program needed, of small values and of large ones.
        self._needed, self._most_needed = [0, 0], [0, 0]
        self.num_bytes = self.most_live = 0
        self.most_saved = self.most_passed = self.most_held = 0

    @property
    def most_active(self) -> int:
        """Return the most that was held while a program ran, with what it took."""
        return sum(map(max, self._most_needed, self._needed))

    def put(self, kind: SavedKind, size: Size, read_bytes: int) -> None:
        """Count values that the last program has made, or has read and left.

        Args:
            kind: What they are.
            size: Their size.
            read_bytes: Bytes of the small ones that it has read.
        """
        self.num_bytes += size.num_bytes
        self._small += size.small_bytes
        self._small_read -= read_bytes
        made = size.small_bytes - read_bytes
        self._needed = [self._needed[0] + made, self._needed[1] - made]
        self._live += kind == "saved"
        self._passed += size.num_bytes if kind == "residual" else 0
        self.most_live = max(self.most_live, self._live)
        self.most_passed = max(self.most_passed, self._passed)
        self.most_saved = max(self.most_saved, self.num_bytes - self._passed)
        self.most_held = max(self.most_held, self.num_bytes)

    def take(self, kind: SavedKind, size: Size) -> None:
        """Count values as those that the next program reads."""
        self.num_bytes -= size.num_bytes
        self._small -= size.small_bytes
        self._taken += size.num_bytes
        self._small_taken += size.small_bytes
        self._live -= kind == "saved"
        self._passed -= size.num_bytes if kind == "residual" else 0

    def run(self, extra_bytes: int) -> None:
        """Count a program that reads what was taken since the last one.

        Args:
            extra_bytes: What it needs of its own on a device.
        """
        self._most_needed = [*map(max, self._most_needed, self._needed)]
        known = self._small + self._small_taken
        large = self.num_bytes + self._taken + extra_bytes - known
        self._needed = [known + self._small_read, large]
        self._small_read, self._small_taken, self._taken = self._small_taken, 0, 0


class SavedValues:
    """A stage's saved activations and the like, and their bytes on one device.

    Args:
        most_small: Size of the largest values that are small, zero if none are.

    Attributes:
        own: What the stage holds.
        of_rank: What all stages of the rank hold that share it.
    """

    def __init__(self, *, most_small: int = 0) -> None:
        self._most_small = most_small
        self._values: dict[tuple[SavedKind, int], dict[str, Tensor]] = {}
        self._sizes: dict[tuple[SavedKind, int], Size] = {}
        # Names of what the last program has read, and of what the next one will.
        self._read: set[str] = set()
        self._taken: set[str] = set()
        self.of_rank = HeldBytes()
        self.clear()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def num_bytes(self) -> int:
        """Return how many bytes are held now."""
        return self.own.num_bytes

    def clear(self) -> None:
        """Drop everything and count afresh."""
        self._values.clear()
        self._sizes.clear()
        self._read, self._taken = set(), set()
        self.own = HeldBytes()

    def share(self, first: "SavedValues") -> None:
        """Count what the rank holds together with its first stage, from now on."""
        self.of_rank = HeldBytes() if first is self else first.of_rank

    def put(
        self,
        kind: SavedKind,
        microbatch: int,
        values: dict[str, Tensor],
        sizes: dict[str, int],
    ) -> None:
        """Keep the values of a microbatch until they are taken; `sizes` is for them."""
        num_bytes = total_bytes(values, sizes)
        small = {x: sizes[x] for x in values if sizes[x] <= self._most_small}
        size = Size(num_bytes, sum(small.values()))
        read_bytes = sum(small[x] for x in small.keys() & self._read)
        self._values[kind, microbatch] = values
        self._sizes[kind, microbatch] = size
        for held in (self.own, self.of_rank):
            held.put(kind, size, read_bytes)

    def has(self, kind: SavedKind, microbatch: int) -> bool:
        """Return whether there is something to take."""
        return (kind, microbatch) in self._values

    def take(self, kind: SavedKind, microbatch: int) -> dict[str, Tensor]:
        """Return values, which count only until the next program has run."""
        size = self._sizes.pop((kind, microbatch))
        for held in (self.own, self.of_rank):
            held.take(kind, size)
        values = self._values.pop((kind, microbatch))
        self._taken.update(values)
        return values

    def note_run(self, extra_bytes: int) -> None:
        """Count a program that reads what was taken since the last one.

        Args:
            extra_bytes: What it needs of its own on a device.
        """
        self._read, self._taken = self._taken, set()
        for held in (self.own, self.of_rank):
            held.run(extra_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """The most that a stage, or all of a rank, held on one device in a step.

    Args:
        num_live: Microbatches between their forward and the end of their backward,
            each for every stage.
        saved_bytes: The most that was held between two programs of what forwards have
            saved for those microbatches, gradients of losses, and outputs.
        passed_bytes: The most that backwards of inputs had left for those of weights;
            it need not have been at the same time.
        held_bytes: The most that was held of both at once.
        state_bytes: Parameters, buffers, gradients and their sums.
        active_bytes: The most that was held while a program ran, and all that this
            program takes: its temporaries and results. Where the memory of small values
            stays with the process: the most of those at any time, and the most of large
            ones.
        optimizer_bytes: What optimizers keep for the parameters now.
    """

    num_live: int
    saved_bytes: int
    passed_bytes: int = 0
    held_bytes: int = 0
    state_bytes: int
    active_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Return all that was held at most."""
        return self.state_bytes + self.optimizer_bytes + self._running_bytes

    @property
    def _running_bytes(self) -> int:
        return max(self.active_bytes, self.held_bytes, self.saved_bytes)

    def __str__(self) -> str:
        peak, state, optimizer, active, saved, passed = (
            f"{count / 2**20:.1f}"
            for count in (
                self.peak_bytes,
                self.state_bytes,
                self.optimizer_bytes,
                self._running_bytes,
                self.saved_bytes,
                self.passed_bytes,
            )
        )
        for_weights = f", and I left up to {passed} for W" if self.passed_bytes else ""
        return (
            f"{peak} MiB on a device: {state} of parameters, buffers and gradients, "
            f"{optimizer} of optimizers, {active} in programs and between them, where "
            f"up to {self.num_live} microbatches saved {saved}{for_weights}"
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
