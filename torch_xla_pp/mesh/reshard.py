"""The slices of a value that devices of one rank send to devices of another.

Laws:

* Every element of the value is sent by one device, once; padding is left out. All
devices of the receiver that hold a tile get its pieces, from the one message: ranks are
connected, not devices.
* Where several devices of the sender hold a tile, each sends about an equal share of
it.
* Where a value is tiled alike on both, each tile is one piece, from the lowest device
  that holds it.
"""

import functools
import itertools
from typing import NamedTuple

from torch_xla_pp.mesh.tiling import Box, Tiling


class Piece(NamedTuple):
    """One slice of a value that is sent.

    Attributes:
        source: The sender's device that it comes from.
        tile: The receiver's tile that it is part of.
        box: Its place in the value.
    """

    source: int
    tile: int
    box: Box


class Runs(NamedTuple):
    """The place of a box in a dense array: runs of elements at regular distances.

    Attributes:
        offset: Place of the first element.
        length: Number of contiguous elements.
        levels: Number of repetitions and the distance between them, outermost first.
    """

    offset: int
    length: int
    levels: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, box: Box, shape: tuple[int, ...]) -> "Runs":
        """Find a box in an array of shape `shape`."""
        offset, length, distance, is_whole = 0, 1, 1, True
        levels: list[tuple[int, int]] = []
        for first, size, extent in reversed(list(zip(*box, shape, strict=True))):
            offset += first * distance
            if is_whole:
                length *= size
            elif size != 1:
                levels.insert(0, (size, distance))
            is_whole = is_whole and size == extent
            distance *= extent
        return cls(offset, length, tuple(levels))


@functools.lru_cache(maxsize=4096)
def reshard(source: Tiling, destination: Tiling) -> tuple[Piece, ...]:
    """Plan the sending of a value from one rank's devices to another's.

    Args:
        source: Its tiling on the sender's devices.
        destination: Its tiling on the receiver's.

    Returns:
        The pieces, in the order in which both sides list them.

    Raises:
        ValueError: The tilings are of different shapes.
    """
    if source.shape != destination.shape:
        raise ValueError(
            f"reshard: expected one shape on both sides, got {list(source.shape)} and "
            f"{list(destination.shape)}. Send what the receiver expects."
        )
    if source == destination:
        tiles = {tile: source.holders(tile)[0] for tile in source.tiles}
        whole = [Piece(device, t, source.box(t)) for t, device in tiles.items()]
        return tuple(piece for piece in whole if piece.box.num_elements)
    pieces = []
    for number, cell in enumerate(_cells(source, destination)):
        holders = source.holders(source.tile_at(cell.start))
        for turn, share in enumerate(_shares(cell, len(holders)), number):
            device = holders[turn % len(holders)]
            pieces.append(Piece(device, destination.tile_at(cell.start), share))
    return tuple(pieces)


def _cells(source: Tiling, destination: Tiling) -> list[Box]:
    """Cut a value so that each part is in one tile of either side."""
    sides = []
    for dim in range(len(source.shape)):
        cuts = sorted(source.cuts(dim) | destination.cuts(dim))
        sides.append([(a, b - a) for a, b in itertools.pairwise(cuts)])
    return [
        Box(tuple(a for a, _ in sides_of), tuple(n for _, n in sides_of))
        for sides_of in itertools.product(*sides)
    ]


def _shares(box: Box, count: int) -> list[Box]:
    """Cut a box into at most `count` parts along one dimension, preferably outer."""
    if count == 1 or not box.sizes:
        return [box]
    enough = [dim for dim, size in enumerate(box.sizes) if size >= count]
    dim = enough[0] if enough else box.sizes.index(max(box.sizes))
    size, first = box.sizes[dim], box.start[dim]
    count = min(count, size)
    ends = [size * k // count for k in range(count + 1)]
    return [
        Box(_with(box.start, dim, first + a), _with(box.sizes, dim, b - a))
        for a, b in itertools.pairwise(ends)
    ]


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
