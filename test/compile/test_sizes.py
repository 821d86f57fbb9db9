"""Sizes of values are read once, and their sums are kept."""

import pytest
import torch

from torch_xla_pp.compile import ValueSizes, route_in

pytestmark = pytest.mark.pure


def test_sums_are_those_of_the_names_and_of_values_that_are_small_enough() -> None:
    sizes = ValueSizes({"a": 100, "b": 60, "c": 7})
    for _ in range(2):
        assert sizes.total(["a", "b"]) == sizes.total(["b", "a"]) == 160
        assert sizes.total(["a", "b"], 60) == 60
        assert sizes.total(["a", "b", "c"], 60) == 67
        assert sizes.total(["a", "b"], 5) == sizes.total([]) == 0
    with pytest.raises(KeyError):
        sizes.total(["unknown"])


def test_routes_are_the_transport_s() -> None:
    values = {"a": torch.ones(3), route_in(1): torch.ones(4)}
    assert ValueSizes({"a": 100}).of(values) == 100
