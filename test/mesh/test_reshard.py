"""Whatever the two sides are, every element arrives, and leaves once."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import resharded
from torch import Tensor

from torch_xla_pp.hlo import parse_sharding
from torch_xla_pp.mesh import Box, Runs, Tiling, reshard

pytestmark = pytest.mark.pure

Sides = tuple[Tiling, Tiling]


def tiling(text: str, shape: tuple[int, ...], num_devices: int) -> Tiling:
    return parse_sharding(text).tiling(shape, num_devices)


def shards_of(value: Tensor, side: Tiling) -> list[Tensor]:
    """Return what each device holds; padding is -1."""
    shards = []
    for tile in side.tiles:
        shard = torch.full(side.shard_shape, -1)
        box = side.box(tile)
        shard[box.within(box).slices] = value[box.slices]
        shards.append(shard)
    return shards


def moved(shards: list[Tensor], sides: Sides) -> tuple[list[Tensor], Counter[int]]:
    """Carry pieces over, element by element; also count how often each one arrives."""
    source, destination = sides
    received = [torch.full(destination.shard_shape, -1) for _ in destination.tiles]
    arrivals: Counter[int] = Counter()
    for piece in reshard(source, destination):
        home = source.box(source.tiles[piece.source])
        sent = shards[piece.source][piece.box.within(home).slices]
        arrivals.update(sent.flatten().tolist())
        for device in destination.holders(piece.tile):
            target = piece.box.within(destination.box(piece.tile)).slices
            assert (received[device][target] == -1).all()
            received[device][target] = sent
    return received, arrivals


@given(resharded())
def test_every_element_leaves_once_and_arrives_wherever_it_belongs(
    sides: Sides,
) -> None:
    source, destination = sides
    value = torch.arange(math.prod(source.shape)).reshape(source.shape)
    received, arrivals = moved(shards_of(value, source), sides)
    assert set(arrivals) == set(range(value.numel()))
    assert set(arrivals.values()) <= {1}
    expected = shards_of(value, destination)
    assert all(map(torch.equal, received, expected))
    # And back, which is how gradients go.
    returned, _ = moved(received, (destination, source))
    assert all(map(torch.equal, returned, shards_of(value, source)))


@given(resharded())
def test_a_tile_on_several_devices_is_sent_by_all_of_them(sides: Sides) -> None:
    if sides[0] == sides[1] or not sides[0].shape:
        return
    # What divides by every number of parts and of devices is shared out evenly.
    shape = tuple(12 * 840 * bool(size) for size in sides[0].shape)
    source, destination = (replace(side, shape=shape) for side in sides)
    sent = Counter[int]()
    for piece in reshard(source, destination):
        sent[piece.source] += piece.box.num_elements
    for tile in set(source.tiles):
        assert len({sent[device] for device in source.holders(tile)}) == 1


@given(resharded())
def test_alike_on_both_sides_is_the_pairing_of_devices(sides: Sides) -> None:
    side, _ = sides
    pieces = reshard(side, side)
    assert {(p.source, p.tile) for p in pieces} == {
        (owner, tile)
        for owner, tile in zip(side.owners, side.tiles, strict=True)
        if side.box(tile).num_elements
    }
    assert all(p.box == side.box(p.tile) for p in pieces)


@given(resharded(), st.data())
def test_a_box_is_runs_of_a_dense_array(sides: Sides, data: st.DataObject) -> None:
    shape = sides[0].shape
    sizes = tuple(data.draw(st.integers(1, n)) if n else 0 for n in shape)
    start = tuple(
        data.draw(st.integers(0, n - size))
        for n, size in zip(shape, sizes, strict=True)
    )
    box = Box(start, sizes)
    array = torch.arange(math.prod(shape)).reshape(shape)
    runs = Runs.of(box, shape)
    places = [runs.offset]
    for count, distance in runs.levels:
        places = [place + k * distance for place in places for k in range(count)]
    found = [place + k for place in places for k in range(runs.length)]
    assert found == array[box.slices].flatten().tolist()


@pytest.mark.parametrize(
    ("source", "destination", "moves"),
    [
        # Four devices to two: two of them fill one.
        (("{devices=[4,1]<=[4]}", 4), ("{devices=[2,1]<=[2]}", 2), "00 10 21 31"),
        # (2, 2) to (4, 1): each device keeps half of what it has got.
        (
            ("{devices=[2,2]<=[4]}", 4),
            ("{devices=[4,1]<=[4]}", 4),
            "00 10 01 11 22 32 23 33",
        ),
        # Replicated, as after tensor parallelism, to a split batch: all four send.
        (("", 4), ("{devices=[4,1]<=[4]}", 4), "00 10 20 30 11 21 31 01"),
        # Three rows of tiles to two: the one in the middle goes to both.
        (("{devices=[3,1]<=[3]}", 3), ("{devices=[2,1]<=[2]}", 2), "00 10 11 21"),
    ],
)
def test_known_moves(
    source: tuple[str, int], destination: tuple[str, int], moves: str
) -> None:
    shape = (24, 4)
    pieces = reshard(
        tiling(source[0], shape, source[1]),
        tiling(destination[0], shape, destination[1]),
    )
    assert " ".join(f"{p.source}{p.tile}" for p in pieces).startswith(moves)


def test_both_sides_must_have_one_shape() -> None:
    one, other = (Tiling(shape=(n,), grid=(1,), tiles=(0,)) for n in (2, 3))
    with pytest.raises(ValueError, match=r"one shape on both sides, got \[2\] and \[3"):
        reshard(one, other)


def test_a_tile_that_nobody_holds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"every part on a device, got parts \(2,\)"):
        Tiling(shape=(4,), grid=(2,), tiles=(0, 0))
    assert str(Tiling(shape=(4,), grid=(2,), tiles=(0, 1))) == "2 on 2 devices"
