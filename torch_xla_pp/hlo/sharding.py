"""Read the HLO text of a sharding.

XLA prints how a value is sharded over the devices of a rank as text, for instance

    {replicated}                                        every device holds all
    {devices=[2,1]0,1}                                  rows over two devices
    {devices=[2,2]<=[2,2]T(1,0)}                        device ids as a permuted iota
    {devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}    rows over two groups of two

The text can travel between processes; the sharding object of torch_xla cannot.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from torch_xla_pp.mesh import Tiling

_REPLICATED, _MAXIMAL, _TILED, _PARTIAL = 0, 1, 3, 5

_TILES = re.compile(
    r"devices=\[(?P<tiles>[\d,]+)\]"
    r"(?:<=\[(?P<iota>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<ids>\d+(?:,\d+)*))"
    r"(?P<last> last_tile_dim_replicate| last_tile_dims=\{replicated\})?"
)
_MAXIMAL_DEVICE = re.compile(r"maximal device=(?P<id>\d+)")

Nested = list["Nested"] | list[int]


class OpShardingArgs(NamedTuple):
    """The arguments of torch_xla's `OpSharding`, in its order.

    Args:
        tile_assignment: Device ids, nested as the tiles are.
        group_assignment: Ids of replication groups, nested as the tiles are; empty
            without partial replication.
        replication_groups: The device ids of each group.
        sharding_type: Number of the kind of sharding in XLA's protocol.
    """

    tile_assignment: Nested
    group_assignment: Nested
    replication_groups: list[list[int]]
    sharding_type: int

    @classmethod
    def of_tiles(cls, tiles: Sequence[int]) -> "OpShardingArgs":
        """Split one dimension into given parts on devices.

        Args:
            tiles: For each device, the part that it holds, as `tile_of_device` returns
                it; each part is on equally many devices.
        """
        count = max(tiles) + 1
        if count == 1:
            return REPLICATED
        ids = sorted(range(len(tiles)), key=lambda device: tiles[device])
        if len(tiles) == count:
            return cls(ids, [], [], _TILED)
        return _partial(ids, [count, len(tiles) // count])

    @property
    def tiles(self) -> tuple[int, ...]:
        """Return the number of parts of each dimension, empty if none is split."""
        if self.sharding_type == _PARTIAL:
            return _nested_shape(self.group_assignment)
        if self.sharding_type == _TILED:
            return _nested_shape(self.tile_assignment)
        return ()

    @property
    def text(self) -> str:
        """Return it as HLO text, which `parse_sharding` reads.

        Raises:
            ValueError: The sharding is that of a single device.
        """
        if self.sharding_type == _REPLICATED:
            return "{replicated}"
        if self.sharding_type not in (_TILED, _PARTIAL):
            raise ValueError(
                f"sharding: expected one over all devices, got one of type "
                f"{self.sharding_type}. Annotate the tensor over the local mesh."
            )
        tiles, ids, last = self.tiles, _flatten(self.tile_assignment), ""
        if self.sharding_type == _PARTIAL:
            numbers = _flatten(self.group_assignment)
            groups = [self.replication_groups[number] for number in numbers]
            ids = [device for group in groups for device in group]
            # torch_xla also writes groups of one device, XLA does not.
            if len(groups[0]) > 1:
                tiles, last = (*tiles, len(groups[0])), " last_tile_dim_replicate"
        return f"{{devices=[{_listed(tiles)}]{_listed(ids)}{last}}}"

    def tiling(self, shape: Sequence[int], num_devices: int) -> Tiling:
        """Return how a value of shape `shape` is tiled over the devices of a rank.

        Raises:
            ValueError: The sharding is for another number of dimensions, or not one
                over all devices.
        """
        tiles = self.tile_of_device(num_devices)
        return Tiling(shape=tuple(shape), grid=self._grid(shape), tiles=tiles)

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of one device's part of a tensor, padding included.

        Raises:
            ValueError: The sharding is for another number of dimensions.
        """
        pairs = zip(shape, self._grid(shape), strict=True)
        return tuple(-(-size // n) for size, n in pairs)

    def _grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        tiles = self.tiles or (1,) * len(shape)
        if len(tiles) != len(shape):
            raise ValueError(
                f"sharding: expected a tensor of {len(tiles)} dimensions, got shape "
                f"{list(shape)}. Annotate the tensor anew."
            )
        return tiles

    def tile_of_device(self, num_devices: int) -> tuple[int, ...]:
        """Return for each device the part of a value that it holds, 0 if there is one.

        Raises:
            ValueError: The sharding is that of a single device, or has other devices.
        """
        if self.sharding_type == _REPLICATED:
            return (0,) * num_devices
        groups = [[device] for device in _flatten(self.tile_assignment)]
        if self.sharding_type == _PARTIAL:
            numbers = _flatten(self.group_assignment)
            groups = [self.replication_groups[number] for number in numbers]
        tiles = {device: tile for tile, group in enumerate(groups) for device in group}
        if self.sharding_type == _MAXIMAL or sorted(tiles) != list(range(num_devices)):
            raise ValueError(
                f"sharding: expected one over all {num_devices} local devices, got "
                f"one over {sorted(tiles)}. Annotate the tensor over the local mesh."
            )
        return tuple(tiles[device] for device in range(num_devices))


REPLICATED = OpShardingArgs([], [], [], _REPLICATED)


def stacked(
    first: OpShardingArgs, rest: OpShardingArgs, num_dims: int, num_devices: int
) -> OpShardingArgs | None:
    """Return the sharding of a stack of values: split along it, and inside it.

    Args:
        first: Sharding of the first dimension, as of a value with that one alone.
        rest: The sharding of each value of the stack.
        num_dims: The dimensions of these values.
        num_devices: The local devices.

    Returns:
        None if both split over the same devices, so that there is no such sharding.
    """
    tiles = [*(first.tiles or (1,)), *(rest.tiles or (1,) * num_dims)]
    parts: dict[tuple[int, int], list[int]] = {}
    outer, inner = (x.tile_of_device(num_devices) for x in (first, rest))
    for device, part in enumerate(zip(outer, inner, strict=True)):
        parts.setdefault(part, []).append(device)
    sizes = {len(devices) for devices in parts.values()}
    if len(parts) != math.prod(tiles) or len(sizes) != 1:
        return None
    ids = [device for part in sorted(parts) for device in parts[part]]
    (size,) = sizes
    if size > 1:
        return _partial(ids, [*tiles, size])
    return OpShardingArgs(_nest(ids, tiles), [], [], _TILED)


def parse_sharding(text: str) -> OpShardingArgs:
    """Translate HLO text into the arguments of torch_xla's sharding.

    Args:
        text: The text in braces; empty (no annotation) means replicated.

    Raises:
        ValueError: The text is malformed, or of a kind that does not show which device
            holds which part (`manual`, tuples).
    """
    body = text.strip().removeprefix("{").removesuffix("}").strip()
    # `last_tile_dims={replicated}` ends in a brace of its own.
    body = body + "}" if body.endswith("={replicated") else body
    if body in ("", "replicated"):
        return REPLICATED
    maximal = _MAXIMAL_DEVICE.fullmatch(body)
    if maximal:
        return OpShardingArgs([int(maximal["id"])], [], [], _MAXIMAL)
    match = _TILES.fullmatch(body)
    if match is None:
        raise _malformed(text)
    tiles = _numbers(match["tiles"])
    ids = _device_ids(match)
    if len(ids) != math.prod(tiles) or sorted(ids) != list(range(len(ids))):
        raise _malformed(text)
    if match["last"]:
        return _partial(ids, tiles)
    return OpShardingArgs(_nest(ids, tiles), [], [], _TILED)


def _partial(ids: list[int], tiles: list[int]) -> OpShardingArgs:
    *shape, size = tiles
    groups = [ids[i : i + size] for i in range(0, len(ids), size)]
    numbers = _nest(list(range(len(groups))), shape)
    return OpShardingArgs(_nest(ids, tiles), numbers, groups, _PARTIAL)


def _device_ids(match: re.Match[str]) -> list[int]:
    if match["ids"] is not None:
        return _numbers(match["ids"])
    return device_ids(match["iota"], match["order"])


def device_ids(iota: str, permutation: str | None) -> list[int]:
    """Return device ids that are written as a permuted iota.

    Args:
        iota: Sizes of the dimensions, e.g. "2,4".
        permutation: The order of the dimensions, None for the usual one.

    Raises:
        ValueError: The order is not a permutation of the dimensions.
    """
    shape = _numbers(iota)
    order = _numbers(permutation) if permutation else list(range(len(shape)))
    if sorted(order) != list(range(len(shape))):
        raise _malformed(f"{{<=[{iota}]T({permutation})}}")
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ids = [0]
    for dim in order:
        ids = [i + strides[dim] * k for i in ids for k in range(shape[dim])]
    return ids


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _nest(values: list[int], shape: Sequence[int]) -> Nested:
    if len(shape) <= 1:
        return values
    size = len(values) // shape[0]
    return [_nest(values[i : i + size], shape[1:]) for i in range(0, len(values), size)]


def _flatten(values: Nested | int) -> list[int]:
    if isinstance(values, int):
        return [values]
    return [number for value in values for number in _flatten(value)]


def _nested_shape(values: Nested | int) -> tuple[int, ...]:
    if isinstance(values, int):
        return ()
    return (len(values), *_nested_shape(values[0]))


def _malformed(text: str) -> ValueError:
    return ValueError(
        f"sharding: cannot read {text!r}: expected HLO text such as {{replicated}}, "
        f"{{devices=[2,1]0,1}} or {{devices=[2,1,2]<=[4] last_tile_dim_replicate}}. "
        f"Annotate the tensor with mark_sharding over all devices of the rank."
    )
