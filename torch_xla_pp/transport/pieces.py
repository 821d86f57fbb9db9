"""Messages between ranks that shard values differently, cut by `mesh.reshard`.

Both sides compute the same pieces from the two tilings, so a message needs no
description of them. `there` is always the tiling of values on the peer's devices.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_xla_pp.mesh import Runs, Tiling, reshard
from torch_xla_pp.native import ROW_FIELDS, row_of
from torch_xla_pp.transport.shard_bytes import from_bytes, to_bytes
from torch_xla_pp.transport.stage_transport import ShardLayout


def are_alike(layouts: Sequence[ShardLayout], there: Sequence[Tiling] | None) -> bool:
    """Return whether each device needs only the shard of the paired device of the peer.

    Args:
        layouts: Layouts of the values on this rank.
        there: Their tilings on the peer, None for the same.
    """
    return there is None or [layout.tiling for layout in layouts] == list(there)


def part_sizes(
    layouts: Sequence[ShardLayout], there: Sequence[Tiling] | None
) -> list[int]:
    """Return the bytes of a message's parts: shards, or all pieces of a value.

    Args:
        layouts: Layouts of the values on this rank.
        there: Their tilings on the peer, None for the same.
    """
    if are_alike(layouts, there):
        return [
            math.prod(layout.shard_shape) * layout.dtype.itemsize
            for layout in layouts
            for _ in range(layout.tiling.num_shards)
        ]
    return [math.prod(layout.shape) * layout.dtype.itemsize for layout in layouts]


def piece_table(
    layouts: Sequence[ShardLayout], there: Sequence[Tiling], *, is_receive: bool
) -> tuple[int, list[int]]:
    """Return the places of a message's pieces on this rank's devices.

    Returns:
        The number of levels of each piece, and for each piece the fields and levels of
        a row of `native.abi`.
    """
    rows = []
    for number, (layout, far) in enumerate(zip(layouts, there, strict=True)):
        own, size = layout.tiling, layout.dtype.itemsize
        for piece in reshard(far, own) if is_receive else reshard(own, far):
            home = own.box(piece.tile if is_receive else own.tiles[piece.source])
            runs = Runs.of(piece.box.within(home), own.shard_shape)
            head = row_of(
                ROW_FIELDS,
                tensor=number,
                source=piece.source,
                tile=piece.tile,
                offset=runs.offset * size,
                run=runs.length * size,
            )
            rows.append((head, [(n, distance * size) for n, distance in runs.levels]))
    depth = max((len(levels) for _, levels in rows), default=0)
    table: list[int] = []
    for head, levels in rows:
        padded = [*levels, *[(1, 0)] * (depth - len(levels))]
        table += [*head, *(number for level in padded for number in level)]
    return depth, table


def pack_pieces(shards: Sequence[Tensor], own: Tiling, there: Tiling) -> Tensor:
    """Return the bytes of all pieces of a value, each element once.

    Args:
        shards: Each device's shard on the host, or the one that all hold.
        own: Tiling of the value on this rank.
        there: Its tiling on the peer.
    """
    parts = []
    for piece in reshard(own, there):
        shard = shards[piece.source if len(shards) > 1 else 0]
        home = own.box(own.tiles[piece.source])
        parts.append(shard[piece.box.within(home).slices].reshape(-1))
    empty = shards[0].new_empty(0)
    return to_bytes(torch.cat(parts) if parts else empty)


def unpack_pieces(data: Tensor, layout: ShardLayout, there: Tiling) -> list[Tensor]:
    """Return each device's shard of a value, or the one that all hold.

    Args:
        data: The result of the peer's `pack_pieces`.
        layout: Layout of the value on this rank.
        there: Its tiling on the peer.
    """
    own = layout.tiling
    tiles = {t: torch.zeros(own.shard_shape, dtype=layout.dtype) for t in own.tiles}
    values, first = from_bytes(data, (-1,), layout.dtype), 0
    for piece in reshard(there, own):
        end = first + piece.box.num_elements
        place = piece.box.within(own.box(piece.tile)).slices
        tiles[piece.tile][place] = values[first:end].reshape(piece.box.sizes)
        first = end
    return [tiles[tile] for tile in own.tiles][: own.num_shards]
