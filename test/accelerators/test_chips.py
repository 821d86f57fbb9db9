"""The figures of chips agree with each other and have sources."""

from dataclasses import fields

import pytest

from torch_xla_pp.accelerators import CHIP_SOURCES, CHIPS, Chip

pytestmark = pytest.mark.pure

# Units of 128 x 128 in the cores of a chip. Those of v6e are larger; the compiler plans
# with more than 400,000 FLOP a cycle, which is that many.
UNITS = {"v4": 2 * 4, "v5e": 4, "v5p": 2 * 4, "v6e": 4 * 4}


def test_every_figure_has_a_source() -> None:
    assert {field.name for field in fields(Chip)} == {"name", *CHIP_SOURCES}
    linked = [source for source in CHIP_SOURCES.values() if "https://" in source]
    # The others are the compiler's own figures.
    assert len(linked) == len(CHIP_SOURCES) - 2


def test_there_is_less_memory_than_is_sold() -> None:
    sold = {"v4": 32, "v5e": 16, "v5p": 96, "v6e": 32}
    for name, chip in CHIPS.items():
        assert 0 < chip.usable_bytes < sold[name] * 2**30


def test_clocks_are_those_at_which_units_for_products_come_to_the_peak() -> None:
    for name, chip in CHIPS.items():
        flops = UNITS[name] * 128 * 128 * 2 * chip.clock_hz
        assert flops == pytest.approx(chip.flops_per_s, rel=0.005)


def test_a_chip_has_two_links_for_each_dimension() -> None:
    assert {name: chip.num_links for name, chip in CHIPS.items()} == {
        "v4": 6,
        "v5e": 4,
        "v5p": 6,
        "v6e": 4,
    }
