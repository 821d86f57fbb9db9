"""Exchanges take what the formulas of rings say."""

import pytest

from torch_xla_pp.accelerators import (
    CHIPS,
    HOP_S,
    CompiledProgram,
    DeviceCollective,
    ProgramBytes,
    ProgramTime,
    Slice,
    exchange_s,
)

pytestmark = pytest.mark.pure

MIB = 2**20
SMALL = Slice.parse("v5e:2x2")
LINE = Slice.parse("v5e:4x1")
RING = Slice.parse("v5e:16x16")
SPEED = CHIPS["v5e"].link_bytes_per_s


def collective(
    kind: str, *groups: tuple[int, ...], num_bytes: int = MIB, hidden: bool = False
) -> DeviceCollective:
    return DeviceCollective(
        kind=kind, groups=groups, num_bytes=num_bytes, is_asynchronous=hidden
    )


def seconds(kind: str, topology: Slice, *groups: tuple[int, ...]) -> float:
    return exchange_s(collective(kind, *groups), topology)


def test_a_gather_of_two_neighbours_sends_each_half_over_one_link() -> None:
    found = seconds("all-gather", SMALL, (0, 1), (2, 3))
    assert found == pytest.approx(MIB / 2 / SPEED + HOP_S)


def test_a_gather_along_a_line_is_that_of_the_book() -> None:
    # Three shards pass the last link.
    found = seconds("all-gather", LINE, (0, 1, 2, 3))
    assert found == pytest.approx(3 * (MIB / 4) / SPEED + 3 * HOP_S)


def test_a_ring_has_both_directions() -> None:
    found = seconds("all-gather", RING, tuple(range(16)))
    assert found == pytest.approx(15 / 16 * MIB / (2 * SPEED) + 8 * HOP_S)


def test_two_dimensions_have_twice_the_links() -> None:
    found = seconds("all-gather", SMALL, (0, 1, 2, 3))
    assert found == pytest.approx(3 / 4 * MIB / (2 * SPEED) + 2 * HOP_S)
    assert found == seconds("all-gather", SMALL)


def test_a_sum_takes_a_scatter_and_a_gather() -> None:
    gather = seconds("all-gather", LINE, (0, 1, 2, 3))
    assert seconds("all-reduce", LINE, (0, 1, 2, 3)) == pytest.approx(2 * gather)
    part = collective("reduce-scatter", (0, 1, 2, 3), num_bytes=MIB // 4)
    assert exchange_s(part, LINE) == pytest.approx(gather)


def test_groups_between_each_other_share_the_links() -> None:
    # Between 0 and 2, and between 1 and 3, is the same link from 1 to 2.
    found = seconds("all-gather", LINE, (0, 2), (1, 3))
    assert found == pytest.approx(MIB / 2 / (SPEED * 2 / 3) + 2 * HOP_S)


def test_of_an_exchange_of_all_with_all_a_quarter_crosses_the_middle() -> None:
    found = seconds("all-to-all", LINE, (0, 1, 2, 3))
    assert found == pytest.approx(MIB / SPEED + 3 * HOP_S)
    assert seconds("all-to-all", SMALL, (0, 1)) == pytest.approx(
        MIB / 2 / SPEED + HOP_S
    )


def test_messages_of_a_permutation_share_the_links_on_their_ways() -> None:
    shift = [(0, 1), (1, 2), (2, 3), (3, 0)]
    found = seconds("collective-permute", LINE, *shift)
    assert found == pytest.approx(MIB / SPEED + 3 * HOP_S)
    # Both go from 1 to 2.
    found = seconds("collective-permute", LINE, (0, 2), (1, 3))
    assert found == pytest.approx(2 * MIB / SPEED + 2 * HOP_S)
    around = seconds("collective-permute", RING, (0, 15))
    assert around == pytest.approx(MIB / SPEED + HOP_S)


def test_what_stays_takes_no_time() -> None:
    assert seconds("all-reduce", SMALL, (0,), (1,), (2,), (3,)) == 0
    assert seconds("collective-permute", SMALL, (1, 1)) == 0


def program(*found: DeviceCollective, cycles: int = 1500) -> CompiledProgram:
    none = ProgramBytes(arguments=0, outputs=0, aliased=0, temporaries=0, code=0)
    return CompiledProgram(
        num_bytes=none,
        flops=197e3,
        accessed_bytes=819e3,
        cycles=cycles,
        num_timed=int(cycles > 0),
        num_untimed=1,
        untimed_bytes=819_000,
        collectives=found,
    )


def test_cycles_are_taken_at_the_clock_and_the_rest_by_its_bytes() -> None:
    found = ProgramTime.of(program(), SMALL)
    assert found.compute_s == pytest.approx(1e-6 + 2e-6)
    assert found.roofline_s == pytest.approx(1e-6)
    assert found.seconds == found.compute_s


def test_a_program_without_cycles_is_charged_with_its_roofline() -> None:
    assert ProgramTime.of(program(cycles=0), SMALL).compute_s == pytest.approx(1e-6)


def test_hidden_exchanges_count_where_they_take_longer_than_computing() -> None:
    waits = collective("all-reduce", (0, 1, 2, 3))
    small = collective("all-gather", (0, 1), num_bytes=1024, hidden=True)
    large = collective("all-gather", (0, 1), num_bytes=64 * MIB, hidden=True)
    exposed_s = exchange_s(waits, SMALL)
    found = ProgramTime.of(program(waits, small), SMALL)
    assert found.seconds == pytest.approx(3e-6 + exposed_s)
    found = ProgramTime.of(program(waits, large), SMALL)
    assert found.seconds == pytest.approx(exchange_s(large, SMALL) + exposed_s)
