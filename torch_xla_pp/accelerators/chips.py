"""Kinds of chips, in published figures.

A link goes from one chip to the next one along a dimension of their mesh, and has the
same bandwidth each way at once. A chip has two links for each dimension: at the ends of
a dimension, the second one wraps around, if the slice is large enough there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """One chip of a kind; `CHIP_SOURCES` has the sources of its figures.

    Args:
        name: As in names of topologies.
        num_dims: Dimensions of the mesh of chips.
        wraps_at: Sizes that wrap around are multiples of it.
        clock_hz: Clock of what computes.
        flops_per_s: Peak of products of bfloat16.
        memory_bytes: Size of its memory, as its compiler counts.
        memory_bytes_per_s: Bandwidth of the memory.
        link_bytes_per_s: Bandwidth of one link, one way.
        host_bytes_per_s: Bandwidth between it and its host, one way.
        network_bytes_per_s: What it may send between slices, through the data center's
            network.
        table_bytes: What the table of a program's results is a multiple of.
    """

    name: str
    num_dims: int
    wraps_at: int
    clock_hz: float
    flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    host_bytes_per_s: float
    network_bytes_per_s: float
    table_bytes: int

    @property
    def num_links(self) -> int:
        """Return how many neighbours it has links to."""
        return 2 * self.num_dims

    @property
    def usable_bytes(self) -> int:
        """Return the memory that programs may use; the system reserves the rest."""
        return self.memory_bytes - RESERVED_BYTES


RESERVED_BYTES = 258 * _MIB
"""What libtpu 0.0.21 reserves on v5e, by its message that memory is exhausted."""

HOP_S = 1e-6
"""Time of a message to the next chip, whatever its size. Source: as of links."""

_BOOK = "https://jax-ml.github.io/scaling-book/tpus/"
_PAGES = "https://docs.cloud.google.com/tpu/docs/ (v4, v5e, v5p-training, v6e)"

CHIP_SOURCES: Mapping[str, str] = {
    "num_dims": _PAGES,
    "wraps_at": _BOOK,
    "clock_hz": f"of v5e {_BOOK}; of all, the clock at which the compiler's estimated "
    "cycles of a product of 4096 x 4096 x 4096 come to 87 to 97 % of the peak, and at "
    "which the units for products, one of 128 x 128 a cycle each, come to all of it",
    "flops_per_s": _PAGES,
    "memory_bytes": "what libtpu 0.0.40 states of the device",
    "memory_bytes_per_s": _PAGES,
    "link_bytes_per_s": _BOOK,
    "host_bytes_per_s": _BOOK,
    "network_bytes_per_s": _BOOK,
    "table_bytes": "what libtpu 0.0.21 counts of programs with several results",
}
"""Field of `Chip` → where its figures are from."""

CHIPS = {
    found.name: found
    for found in (
        Chip(
            name="v4",
            num_dims=3,
            wraps_at=4,
            clock_hz=1.05e9,
            flops_per_s=275e12,
            memory_bytes=32 * _GIB,
            memory_bytes_per_s=1.2e12,
            link_bytes_per_s=4.5e10,
            host_bytes_per_s=1.6e10,
            network_bytes_per_s=6.25e9,
            table_bytes=512,
        ),
        Chip(
            name="v5e",
            num_dims=2,
            wraps_at=16,
            clock_hz=1.5e9,
            flops_per_s=197e12,
            memory_bytes=int(15.75 * _GIB),
            memory_bytes_per_s=8.19e11,
            link_bytes_per_s=4.5e10,
            host_bytes_per_s=1.6e10,
            network_bytes_per_s=3.125e9,
            table_bytes=512,
        ),
        Chip(
            name="v5p",
            num_dims=3,
            wraps_at=4,
            clock_hz=1.75e9,
            flops_per_s=459e12,
            memory_bytes=int(95.74 * _GIB),
            memory_bytes_per_s=2.765e12,
            link_bytes_per_s=9e10,
            host_bytes_per_s=1.6e10,
            network_bytes_per_s=6.25e9,
            table_bytes=32,
        ),
        Chip(
            name="v6e",
            num_dims=2,
            wraps_at=16,
            clock_hz=1.75e9,
            flops_per_s=918e12,
            memory_bytes=int(31.25 * _GIB),
            memory_bytes_per_s=1.6e12,
            link_bytes_per_s=9e10,
            host_bytes_per_s=3.2e10,
            network_bytes_per_s=1.25e10,
            table_bytes=32,
        ),
    )
}
