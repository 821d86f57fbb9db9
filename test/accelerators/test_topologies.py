"""Slices are named as their compilers name them."""

import pytest

from torch_xla_pp.accelerators import Slice

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("text", ["v5e:2x2", "v5p:2x2x1", "v6e:4x4", "v4:2x2x2"])
def test_a_name_is_read_and_written(text: str) -> None:
    assert str(Slice.parse(text)) == text


def test_devices_are_counted_one_a_chip() -> None:
    assert Slice.parse("v5e:4x4").num_devices == 16
    assert Slice.parse("v5p:2x2x2").num_devices == 8


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("v5e", "expected a kind and a shape, got 'v5e'"),
        ("v9:2x2", "expected one of v4, v5e, v5p, v6e, got 'v9'"),
        ("v5e:2x2x2", "topology v5e:2x2x2: expected 2 sizes from 1, got 2x2x2"),
        ("v5p:2x0x1", "expected 3 sizes from 1, got 2x0x1"),
    ],
)
def test_a_wrong_name_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Slice.parse(text)


def test_a_slice_below_a_host_says_how_large_its_hosts_are() -> None:
    assert Slice.parse("v5e:2x2").compiler_options == {}
    bounds = Slice.parse("v5e:1x1").compiler_options["chips_per_host_bounds"]
    assert bounds == (1, 1, 1)
    bounds = Slice.parse("v5p:2x1x1").compiler_options["chips_per_host_bounds"]
    assert bounds == (2, 1, 1)


def test_every_chip_of_v4_is_one_device() -> None:
    assert Slice.parse("v4:2x2x1").compiler_options == {"chip_config_name": "megacore"}
