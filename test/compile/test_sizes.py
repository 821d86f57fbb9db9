"""Sizes of values are read once, and their sums are kept."""

import pytest
import torch

from torch_xla_pp.compile import ValueSizes, route_in

pytestmark = pytest.mark.pure


def test_sums_are_those_of_the_names_and_of_values_that_are_small() -> None:
    sizes = ValueSizes({"a": 100, "b": 60, "c": 7})
    for _ in range(2):
        assert sizes.total(["a", "b"], 0) == sizes.total(["b", "a"], 0) == (160, 0)
        assert sizes.total(["a", "b"], 60) == (160, 60)
        assert sizes.total(["a", "b", "c"], 60) == (167, 67)
        assert sizes.total(["a", "b"], 5) == (160, 0)
        assert sizes.total([], 5) == (0, 0)
    with pytest.raises(KeyError):
        sizes.total(["unknown"], 0)


def test_routes_are_the_transport_s() -> None:
    values = {"a": torch.ones(3), route_in(1): torch.ones(4)}
    assert ValueSizes({"a": 100}).of(values) == 100
