"""What a compiler reports of a program: its memory, its work and its exchanges."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_xla_pp import record

_FORMAT = "torch_xla_pp compiled program 2"
# A result of several values has a table of their places.
_PLACE_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramBytes:
    """The memory of a compiled program on one device, in the device's own layout.

    Args:
        arguments: Its arguments.
        outputs: Its results.
        aliased: Results that are kept in buffers of arguments.
        temporaries: What it needs while it runs.
        code: The program itself.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def extra(self) -> int:
        """What a run takes beside its arguments."""
        return self.temporaries + self.outputs - self.aliased


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLayout:
    """How a device holds an array: in tiles, the last ones filled up.

    Args:
        bits: Of an element.
        order: The array's dimensions, the one whose elements are next to each other
            first.
        tile: Elements of a tile along the first dimensions of `order`, the last one
            along the very first; empty if there are none.
    """

    bits: int
    order: tuple[int, ...]
    tile: tuple[int, ...] = ()

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of an array, its last tiles filled up.

        Args:
            shape: Its sizes on the device.
        """
        sizes = [shape[dim] for dim in reversed(self.order)]
        sizes = [1] * (len(self.tile) - len(sizes)) + sizes
        whole = len(sizes) - len(self.tile)
        for place, size in enumerate(self.tile, whole):
            sizes[place] = -(-sizes[place] // size) * size
        return math.prod(sizes) * self.bits // 8


def result_bytes(arrays: Sequence[int], table_bytes: int) -> int:
    """Return the bytes of a program's results.

    Args:
        arrays: Bytes of each in its layout.
        table_bytes: As `Chip.table_bytes`.
    """
    if len(arrays) == 1:
        return arrays[0]
    table = -(-len(arrays) * _PLACE_BYTES // table_bytes) * table_bytes
    return sum(arrays) + table


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCollective:
    """One exchange between devices, as compiled.

    Args:
        kind: Its name in HLO, such as "all-reduce".
        groups: Numbers of the devices that exchange with each other; of a permutation,
            pairs of a sender and a receiver; none if the compiler has another way to
            name them.
        num_bytes: Bytes of its result on one device, without padding.
        is_asynchronous: Whether the device computes meanwhile.
        origin: The operation and the line that it comes from, empty if not known.
        times: How often it runs, more than once in the body of a loop.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    num_bytes: int
    is_asynchronous: bool
    origin: str = ""
    times: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledProgram:
    """What a compiler made of a program, or why it made nothing.

    Args:
        error: The compiler's own message, empty if it compiles.
        num_bytes: The memory that it takes, None if it does not compile.
        flops: Of one device, as the compiler counts.
        num_host_calls: How often it calls the host and may go on meanwhile.
        accessed_bytes: Read and written in its memory, likewise.
        cycles: Clock cycles of the instructions for which the compiler states them,
            each as often as it runs; loops of unknown length count once.
        num_timed: How many instructions these are.
        num_untimed: How many others compute something, exchanges left out.
        untimed_bytes: Of the results of these.
        collectives: Exchanges between devices.
        output_shardings: Of each result, as HLO text.
        argument_layouts: Of each argument.
        result_layouts: Of each result.
    """

    error: str = ""
    num_bytes: ProgramBytes | None = None
    flops: float = 0.0
    num_host_calls: int = 0
    accessed_bytes: float = 0.0
    cycles: int = 0
    num_timed: int = 0
    num_untimed: int = 0
    untimed_bytes: int = 0
    collectives: tuple[DeviceCollective, ...] = ()
    output_shardings: tuple[str, ...] = ()
    argument_layouts: tuple[DeviceLayout, ...] = ()
    result_layouts: tuple[DeviceLayout, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.error) == (self.num_bytes is not None):
            raise ValueError(
                "compiled program: expected an error or the bytes that it takes, got "
                f"{'both' if self.error else 'neither'}. Give one of them."
            )

    @property
    def kinds(self) -> Counter[str]:
        """Return how many collectives there are of each kind."""
        return Counter(found.kind for found in self.collectives)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return it as JSON.

        Args:
            path: A file to write as well.
        """
        return record.to_json(self, _FORMAT, path)

    @classmethod
    def from_json(cls, source: str | Path) -> "CompiledProgram":
        """Read what `to_json` wrote: a file, or the text itself.

        Raises:
            ValueError: It is something else.
        """
        return record.from_json(cls, source, _FORMAT)
