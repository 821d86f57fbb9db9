"""The text of a sharding becomes what torch_xla makes a sharding of."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_xla_pp.hlo.sharding import OpShardingArgs, parse_sharding, stacked

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("text", "args"),
    [
        ("", ([], [], [], 0)),
        ("{replicated}", ([], [], [], 0)),
        ("{maximal device=0}", ([0], [], [], 1)),
        ("{devices=[2]0,1}", ([0, 1], [], [], 3)),
        ("{devices=[2,1]1,0}", ([[1], [0]], [], [], 3)),
        ("{devices=[2,1]<=[2]}", ([[0], [1]], [], [], 3)),
        ("{devices=[2,2]<=[4]}", ([[0, 1], [2, 3]], [], [], 3)),
        ("{devices=[2,2]<=[2,2]T(1,0)}", ([[0, 2], [1, 3]], [], [], 3)),
        (
            "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}",
            ([[[0, 2]], [[1, 3]]], [[0], [1]], [[0, 2], [1, 3]], 5),
        ),
        (
            "{devices=[1,2,2]<=[4] last_tile_dims={replicated}}",
            ([[[0, 1], [2, 3]]], [[0, 1]], [[0, 1], [2, 3]], 5),
        ),
    ],
)
def test_known_texts_become_arguments(text: str, args: tuple[object, ...]) -> None:
    assert tuple(parse_sharding(text)) == args


@pytest.mark.parametrize(
    "text",
    [
        "{manual}",
        "{devices=[2,1]0,1,2}",
        "{devices=[2,1]0,0}",
        "{devices=[2,2]<=[2,2]T(0,0)}",
        "{devices=[2,1,2]<=[4] last_tile_dims={manual}}",
        "{{replicated}, {replicated}}",
        "junk",
    ],
)
def test_unreadable_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*expected HLO text such as"):
        parse_sharding(text)


def test_a_shard_has_the_padding_of_an_uneven_cut() -> None:
    assert parse_sharding("{devices=[2,1]0,1}").shard_shape((5, 3)) == (3, 3)


@given(st.integers(1, 3), st.integers(1, 3), st.randoms())
def test_one_dimension_can_be_cut_as_devices_hold_any_value(
    num_tiles: int, num_copies: int, random: Random
) -> None:
    tiles = [*range(num_tiles)] * num_copies
    random.shuffle(tiles)
    args = OpShardingArgs.of_tiles(tiles)
    assert args.tile_of_device(len(tiles)) == tuple(tiles)
    assert args.shard_shape((3 * num_tiles,)) == (3,)


def test_partial_replication_cuts_only_the_tiled_dimensions() -> None:
    sharding = parse_sharding("{devices=[1,2,2]0,2,1,3 last_tile_dim_replicate}")
    assert sharding.tiles == (1, 2)
    assert sharding.shard_shape((4, 6)) == (4, 3)


@pytest.mark.parametrize("text", ["", "{replicated}", "{maximal device=0}"])
def test_an_uncut_value_is_one_shard(text: str) -> None:
    assert parse_sharding(text).shard_shape((5, 3)) == (5, 3)


def test_a_sharding_of_other_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a tensor of 2 dimensions"):
        parse_sharding("{devices=[2,1]0,1}").shard_shape((4,))


@given(st.permutations(range(8)), st.sampled_from([(8,), (2, 4), (2, 2, 2), (1, 8)]))
def test_listed_devices_are_kept_in_order(
    ids: list[int], tiles: tuple[int, ...]
) -> None:
    text = f"{{devices=[{','.join(map(str, tiles))}]{','.join(map(str, ids))}}}"
    sharding = parse_sharding(text)
    assert sharding.tiles == tiles
    assert _flat(sharding.tile_assignment) == list(ids)


def _flat(nested: object) -> list[int]:
    if isinstance(nested, int):
        return [nested]
    return [number for part in nested for number in _flat(part)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "tiles"),
    [
        ("", (0, 0, 0, 0)),
        ("{devices=[4,1]0,1,2,3}", (0, 1, 2, 3)),
        ("{devices=[2,2]<=[2,2]T(1,0)}", (0, 2, 1, 3)),
        ("{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}", (0, 0, 1, 1)),
        ("{devices=[1,2,2]0,2,1,3 last_tile_dim_replicate}", (0, 1, 0, 1)),
    ],
)
def test_each_device_holds_one_tile(text: str, tiles: tuple[int, ...]) -> None:
    assert parse_sharding(text).tile_of_device(4) == tiles


@pytest.mark.parametrize("text", ["{maximal device=1}", "{devices=[2]0,1}"])
def test_a_value_must_be_on_all_devices(text: str) -> None:
    with pytest.raises(ValueError, match="expected one over all 4 local devices"):
        parse_sharding(text).tile_of_device(4)


def split(tiles: tuple[int, ...], ids: list[int]) -> OpShardingArgs:
    last = " last_tile_dim_replicate" if len(tiles) > 1 else ""
    return parse_sharding(
        f"{{devices=[{','.join(map(str, tiles))}]{','.join(map(str, ids))}{last}}}"
    )


@given(st.permutations(range(8)), st.sampled_from([(2, 2, 2), (4, 1, 2), (2, 4, 1)]))
def test_a_stack_is_split_as_the_stack_and_as_its_values(
    ids: list[int], sizes: tuple[int, int, int]
) -> None:
    outer, inner, rest = sizes
    # Device k of the listed ones is at place k of a mesh of these sizes.
    inner_first = [
        ids[(o * inner + i) * rest + r]
        for i in range(inner)
        for o in range(outer)
        for r in range(rest)
    ]
    first = split((outer, inner * rest), ids)
    values = split((1, inner, outer * rest), inner_first)
    found = stacked(first, values, 2, 8)
    assert found is not None
    assert found.tiles == (outer, 1, inner)
    pairs = zip(first.tile_of_device(8), values.tile_of_device(8), strict=True)
    expected = tuple(o * inner + i for o, i in pairs)
    assert found.tile_of_device(8) == expected


def test_a_stack_of_whole_values_is_split_along_the_stack() -> None:
    first, whole = parse_sharding("{devices=[2]0,1}"), parse_sharding("")
    found = stacked(first, whole, 2, 2)
    assert found == parse_sharding("{devices=[2,1,1]0,1}")
    assert stacked(first, whole, 0, 2) == first


def test_a_stack_is_not_split_twice_over_the_same_devices() -> None:
    first = parse_sharding("{devices=[2,2]0,1,2,3 last_tile_dim_replicate}")
    rows = parse_sharding("{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}")
    assert stacked(first, rows, 2, 4) is None


@pytest.mark.parametrize(
    "text",
    [
        "{replicated}",
        "{devices=[2,1]1,0}",
        "{devices=[1,2,2]0,2,1,3 last_tile_dim_replicate}",
    ],
)
def test_a_sharding_is_written_as_it_is_read(text: str) -> None:
    assert parse_sharding(text).text == text


def test_groups_of_one_device_are_no_groups() -> None:
    args = OpShardingArgs([0, 1], [0, 1], [[0], [1]], 5)
    assert args.text == "{devices=[2]0,1}"


def test_a_value_of_one_device_has_no_text_here() -> None:
    with pytest.raises(ValueError, match="expected one over all devices"):
        _ = parse_sharding("{maximal device=1}").text
