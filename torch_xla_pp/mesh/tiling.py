"""The part of a value that each device of a rank holds. Pure, and sent between ranks.

Terms: a *tile* is one part of a value that is cut into a grid; its *shard* is the tile
in a device's memory, dense and padded to the size of the largest tile; a *box* is a
rectangular part of an array of any number of dimensions.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular part of an array.

    Attributes:
        start: Its first index along each dimension.
        sizes: Its size along each dimension.
    """

    start: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Return the number of elements in it."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the index of the box in an array."""
        pairs = zip(self.start, self.sizes, strict=True)
        return tuple(slice(first, first + size) for first, size in pairs)

    def within(self, other: "Box") -> "Box":
        """Return the box relative to the start of another one."""
        pairs = zip(self.start, other.start, strict=True)
        return Box(tuple(own - first for own, first in pairs), self.sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """The tile of a value that each device holds.

    As XLA does, a dimension is cut into parts of one size; the last ones are smaller,
    or empty, where the size does not divide: 5 rows cut into 4 parts are 2, 2, 1 and 0.

    Args:
        shape: Shape of the whole value.
        grid: Number of parts along each dimension.
        tiles: For each device the number of its tile, in the order of rows.

    Raises:
        ValueError: The numbers do not fit each other, or no device holds some tile.
    """

    shape: tuple[int, ...]
    grid: tuple[int, ...]
    tiles: tuple[int, ...]

    def __post_init__(self) -> None:
        is_whole = set(self.tiles) == set(range(math.prod(self.grid)))
        if len(self.grid) != len(self.shape) or not is_whole:
            raise ValueError(
                f"tiling of {list(self.shape)}: expected one number of parts per "
                f"dimension and every part on a device, got parts {self.grid} and "
                f"devices with {self.tiles}. Annotate the value over all devices."
            )

    def __str__(self) -> str:
        cut = "x".join(map(str, self.grid)) if self.num_shards > 1 else "whole"
        return f"{cut} on {len(self.tiles)} devices"

    @property
    def num_shards(self) -> int:
        """Return the number of devices, or 1 if all hold the same."""
        return len(self.tiles) if any(self.tiles) else 1

    @property
    def owners(self) -> tuple[int, ...]:
        """Return for each device the lowest one that holds the same tile."""
        return tuple(self.tiles.index(tile) for tile in self.tiles)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Return the shape of one device's shard, padding included."""
        pairs = zip(self.shape, self.grid, strict=True)
        return tuple(-(-size // parts) for size, parts in pairs)

    def holders(self, tile: int) -> list[int]:
        """Return the devices that hold a tile."""
        return [device for device, held in enumerate(self.tiles) if held == tile]

    def cuts(self, dim: int) -> set[int]:
        """Return where a dimension is cut, its ends included."""
        size, step = self.shape[dim], self.shard_shape[dim]
        return {*range(0, size, max(step, 1)), size}

    def tile_at(self, start: tuple[int, ...]) -> int:
        """Return the number of the tile that an element is in."""
        number = 0
        for index, step, parts in zip(start, self.shard_shape, self.grid, strict=True):
            number = number * parts + index // max(step, 1)
        return number

    def box(self, tile: int) -> Box:
        """Return the box of the value that a tile covers, without padding."""
        start, sizes = [], []
        for size, step, parts in reversed(
            list(zip(self.shape, self.shard_shape, self.grid, strict=True))
        ):
            tile, place = divmod(tile, parts)
            start.append(min(size, place * step))
            sizes.append(min(size, (place + 1) * step) - start[-1])
        return Box(tuple(reversed(start)), tuple(reversed(sizes)))
