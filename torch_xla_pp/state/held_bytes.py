"""The bytes of all that a stage or a rank holds on a device during a step.

Counted are parameters, buffers, gradients, the state of optimizers for the parameters,
values that are saved for microbatches, and what the running program needs beside its
arguments. Programs of a device run one after another, in the order in which they were
enqueued, so all of that is known when they are enqueued. Not counted are the batch, the
needs of programs other than the stage's (such as an optimizer's), and messages that
have arrived before the program that receives them.

A value is *small* if its memory stays with the process when it is freed, as on CPU
devices. It is freed late there: the next program allocates its memory before values
that only the last one read are freed. So the peak is the peak of small values, at any
time, plus that of large ones. The temporary values of a program are one value; if that
is small, it is there while the next program runs.

A *free* value is one that nothing reads any more, whose memory waits for a program that
makes a value like it, see `FreeValues`. The rank holds it, and a stage that is alone.
"""

from typing import Literal, NamedTuple

SavedKind = Literal["saved", "residual", "output", "loss", "kept", "free"]
"""Kinds of values that a stage holds between its programs.

* "saved": values that its forward saved for its backward
* "residual": values that its backward of inputs passes to that of weights
* "output": the stage's output, whose loss is yet to be computed
* "loss": the gradient of its loss
* "kept": the stage's output, which the schedule returns at the end of the step
* "free": values of no microbatch, see above
"""


class Size(NamedTuple):
    """The size of values on one device.

    Attributes:
        num_bytes: All of them.
        small_bytes: Those that are small.
    """

    num_bytes: int
    small_bytes: int


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
