"""Saved activations, and everything else that a stage holds on a device during a step.

Counted are parameters, buffers, gradients, the state of optimizers for the parameters,
values that are saved for microbatches, and what the running program needs beside its
arguments. Programs of a device run one after another, in the order in which they were
enqueued, so all of that is known when they are enqueued. Not counted are the batch, the
needs of programs other than the stage's (such as an optimizer's), and messages that
have arrived before the program that receives them.

A value is *small* if its memory, once freed, stays with the process for others that
are small, as on CPU devices. It is freed late there: the next program allocates its
memory before values that only the last one read are freed. So the peak is the peak of
small values, at any time, plus that of large ones. The temporary values of a program
are one value; if that is small, it is there while the next program runs.

A *free* value is one that nothing reads any more, whose memory waits for a program that
makes a value like it, see `FreeValues`. The rank holds it, and a stage that is alone.
"""

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import Size, ValueSizes, device_bytes
from torch_xla_pp.state.donated import DonatedValues

SavedKind = Literal["saved", "residual", "output", "loss", "kept", "free"]
"""Kinds of values that a stage holds between its programs.

* "saved": values that its forward saved for its backward
* "residual": values that its backward of inputs passes to that of weights
* "output": the stage's output, whose loss is yet to be computed
* "loss": the gradient of its loss
* "kept": the stage's output, which the schedule returns at the end of the step
* "free": values of no microbatch, see above
"""


_NOTHING = Size(0, 0)


class HeldBytes:
    """The bytes that are held on a device as programs are enqueued, and their peaks.

    Attributes:
        num_bytes: How many are held now.
        most_live: The most microbatches that waited for their backward.
        most_saved: The most bytes that were held at once, without those passed from I
            to W and free ones.
        most_passed: The most that backwards of inputs passed on to those of weights.
        most_held: The most bytes that were held at once.
    """

    def __init__(self) -> None:
        # By microbatch, and in bytes.
        self._live = self._passed = self._free = self._taken = 0
        # Of small values: held, taken for the next program, read by the last one.
        self._small = self._small_taken = self._small_read = 0
        # Of temporary values of the last program.
        self._late = 0
        # The needs of the last program, for small and for large values.
        self._needed, self._most_needed = [0, 0], [0, 0]
        self.num_bytes = self.most_live = 0
        self.most_saved = self.most_passed = self.most_held = 0

    @property
    def most_active(self) -> int:
        """Return the most that was held while a program ran, with its own needs."""
        return sum(map(max, self._most_needed, self._needed))

    def put(self, kind: SavedKind, size: Size, read_bytes: int) -> None:
        """Count values that the last program has made, or has read and not freed.

        Args:
            kind: Their kind, see `Kind`.
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
        self._free += size.num_bytes if kind == "free" else 0
        self.most_live = max(self.most_live, self._live)
        self.most_passed = max(self.most_passed, self._passed)
        saved = self.num_bytes - self._passed - self._free
        self.most_saved = max(self.most_saved, saved)
        self.most_held = max(self.most_held, self.num_bytes)

    def leave(self, read_bytes: int) -> None:
        """Count values that the last program has read as those of others from now on.

        Args:
            read_bytes: Bytes of the small ones.
        """
        self._small_read -= read_bytes

    def take(self, kind: SavedKind, size: Size) -> None:
        """Count values as those that the next program reads."""
        self.num_bytes -= size.num_bytes
        self._small -= size.small_bytes
        self._taken += size.num_bytes
        self._small_taken += size.small_bytes
        self._live -= kind == "saved"
        self._passed -= size.num_bytes if kind == "residual" else 0
        self._free -= size.num_bytes if kind == "free" else 0

    def run(self, large_bytes: int, small_bytes: int) -> None:
        """Count a program that reads what was taken since the last one.

        Args:
            large_bytes: What it needs of its own on a device, but for
            small_bytes: its temporary values, if they are small.
        """
        self._most_needed = [*map(max, self._most_needed, self._needed)]
        known = self._small + self._small_taken
        large = self.num_bytes + self._taken + large_bytes - known
        late = self._small_read + self._late
        self._needed = [known + late + small_bytes, large]
        self._late = small_bytes
        self._small_read, self._small_taken, self._taken = self._small_taken, 0, 0


class FreeValues:
    """The free values of a rank on a device, by their bytes.

    A result of a program takes the memory of one that is as large, whatever it is and
    whatever program of whatever stage has made it: XLA's CPU client compares bytes
    alone.
    """

    def __init__(self) -> None:
        self._values: dict[int, list[Tensor]] = {}

    @property
    def sizes(self) -> list[int]:
        """Return how many bytes each value takes."""
        return [size for size, values in self._values.items() for _ in values]

    def put(self, values: Mapping[str, Tensor], sizes: ValueSizes) -> None:
        """Keep values.

        Args:
            values: By name.
            sizes: Their sizes.
        """
        for name, value in values.items():
            self._values.setdefault(sizes[name], []).append(value)

    def take(self, names: Iterable[str], sizes: ValueSizes) -> dict[str, Tensor]:
        """Return a value for each name, as far as there are some.

        Args:
            names: Names of results that are to have the memory.
            sizes: The sizes of those that have been made before.
        """
        found = {}
        for name in names:
            size = sizes.get(name)
            if size is not None and (values := self._values.get(size)):
                found[name] = values.pop()
        return found

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()


class SavedValues:
    """A stage's saved activations and the like, and their bytes on one device.

    Args:
        most_small: Size of the largest values that are small, zero if none are.

    Attributes:
        own: The bytes of the stage.
        of_rank: The bytes of all stages of the rank that share it; those of the stage
            if that is alone.
    """

    def __init__(self, *, most_small: int = 0) -> None:
        self._most_small = most_small
        self._values: dict[tuple[SavedKind, int], dict[str, Tensor]] = {}
        self._sizes: dict[tuple[SavedKind, int], Size] = {}
        # Values that the last program has read, and that the next one will read.
        self._read: set[str] = set()
        self._taken: set[str] = set()
        # Results of the last program that have the memory of free values, and the
        # memory for those of the next one, by their names.
        self._reusing: set[str] = set()
        self._given: dict[str, Tensor] = {}
        self._given_size = _NOTHING
        self._free = FreeValues()
        self._maker: object = None
        self._donated = DonatedValues()
        self.own = self.of_rank = HeldBytes()
        self._is_alone = True

    def __len__(self) -> int:
        return len(self._values)

    @property
    def num_bytes(self) -> int:
        """Return how many bytes are held now."""
        return self.own.num_bytes

    @property
    def free_bytes(self) -> int:
        """Return how many bytes of free values the rank holds."""
        return sum(self._free.sizes)

    def clear(self) -> None:
        """Drop everything but free values, and count afresh."""
        self._values.clear()
        self._sizes.clear()
        self._read, self._taken, self._reusing = set(), set(), set()
        self._given, self._given_size = {}, _NOTHING
        self.own = HeldBytes()
        if self._is_alone:
            self.of_rank = self.own
            self.own.put("free", self._size_of_free(), 0)

    def share(self, first: "SavedValues", num_stages: int) -> None:
        """Count, and keep free values, together with the rank's other stages.

        Args:
            first: Those of the rank's first stage, for which it is called first.
            num_stages: How many stages the rank has.
        """
        self._free = first._free
        self._is_alone = num_stages == 1
        if self._is_alone:
            self.of_rank = self.own
        elif first is self:
            self.of_rank = HeldBytes()
            self.of_rank.put("free", self._size_of_free(), 0)
        else:
            self.of_rank = first.of_rank

    def put(
        self,
        kind: SavedKind,
        microbatch: int,
        values: dict[str, Tensor],
        sizes: ValueSizes,
    ) -> None:
        """Keep values of a microbatch until they are taken."""
        sizes.add(values)
        self._values[kind, microbatch] = values
        self._sizes[kind, microbatch] = self._count(kind, values, sizes)

    def free(self, values: Mapping[str, Tensor], sizes: ValueSizes) -> None:
        """Keep values that nobody reads any more for programs that make such values.

        Args:
            values: By name, of results that programs of the stage have made.
            sizes: Bytes of these and others.
        """
        self._free.put(values, sizes)
        self._count("free", values, sizes)

    def storages(
        self, maker: object, names: Mapping[str, str], sizes: ValueSizes
    ) -> dict[str, Tensor]:
        """Return free values for the results of a program, as far as there are any.

        Args:
            maker: The stage's programs; when they change, the rank's free values are
                dropped, as nothing may make such values any more.
            names: Result → name under which a free value is returned.
            sizes: Bytes of results, unless they have not been made yet.
        """
        if self._maker not in (None, maker):
            self.drop_free()
        self._maker = maker
        self._given = self._free.take(names, sizes)
        self._given_size = sizes.total(self._given, self._most_small)
        self.of_rank.take("free", self._given_size)
        return {names[name]: value for name, value in self._given.items()}

    def drop_free(self) -> None:
        """Drop free values, as when a step has failed that may have made them."""
        self.of_rank.take("free", self._size_of_free())
        self._free.clear()

    def _count(
        self, kind: SavedKind, values: Mapping[str, Tensor], sizes: ValueSizes
    ) -> Size:
        """Count values that the last program has made, or has read and not freed."""
        size = sizes.total(values, self._most_small)
        read, reused = values.keys() & self._read, values.keys() & self._reusing
        there = sizes.total(read | reused, self._most_small).small_bytes
        self.of_rank.put(kind, size, there)
        if self._is_alone:
            return size
        read_bytes = sizes.total(read, self._most_small).small_bytes
        if kind == "free":
            self.own.leave(read_bytes)
        else:
            self.own.put(kind, size, read_bytes)
        return size

    def _size_of_free(self) -> Size:
        found = self._free.sizes
        return Size(sum(found), sum(x for x in found if x <= self._most_small))

    def has(self, kind: SavedKind, microbatch: int) -> bool:
        """Return whether there are values to take."""
        return (kind, microbatch) in self._values

    def take(self, kind: SavedKind, microbatch: int) -> dict[str, Tensor]:
        """Return values, which count only until the next program has run."""
        size = self._sizes.pop((kind, microbatch))
        self.of_rank.take(kind, size)
        if not self._is_alone:
            self.own.take(kind, size)
        values = self._values.pop((kind, microbatch))
        self._taken.update(values)
        return values

    def note_run(self, extra: xla_compat.ExtraBytes, given_bytes: int = 0) -> None:
        """Count a program that reads what was taken since the last one.

        Args:
            extra: What it takes on a device beside its arguments.
            given_bytes: Arguments that were not taken here.
        """
        small_bytes = extra.temporary if extra.temporary <= self._most_small else 0
        large_bytes = given_bytes + extra.num_bytes - small_bytes
        self._read, self._taken = self._taken, set()
        self._reusing, given = {*self._given}, self._given
        if given:
            self._donated.add(given.values())
            self._given = {}
        reused, self._given_size = self._given_size, _NOTHING
        self.of_rank.run(large_bytes, small_bytes)
        if not self._is_alone:
            # To a stage that does not hold free values these are arguments.
            self.own.run(large_bytes + reused.num_bytes, small_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """The peak memory of a stage, or of a rank, on one device in a step.

    Args:
        num_live: Microbatches between their forward and the end of their backward,
            counted in every stage.
        saved_bytes: The peak, between two programs, of values that forwards saved for
            those microbatches, gradients of losses, and outputs.
        passed_bytes: The peak of values passed from backwards of inputs to those of
            weights; it may be at another time.
        held_bytes: The peak of both together, with free values: memory that waits for
            the next values, on ranks of one CPU device. It is the rank's, and counts
            for a stage that is its only one.
        state_bytes: Parameters, buffers, gradients and their sums.
        active_bytes: The peak of what was held while a program ran, plus the program's
            temporaries and results. Where the memory of small values stays with the
            process: the peak of those at any time, plus that of large ones.
        optimizer_bytes: The state of optimizers for the parameters now.
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
        """Return the peak of everything together."""
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
    """Return the bytes of all optimizers' state for parameters on one device.

    It searches every object of the process, which takes a tenth of a second.
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
