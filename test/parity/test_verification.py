"""Differences are measured and printed as a person reads them."""

import math

import pytest
import torch

from torch_xla_pp.parity import Difference, Verification

pytestmark = pytest.mark.pure


def report(*differences: Difference) -> Verification:
    return Verification(title="t", differences=differences, tolerance=1e-4)


def test_a_difference_is_relative_to_the_largest_element() -> None:
    expected = torch.tensor([1.0, -8.0])
    found = Difference.of("output", "o", expected + torch.tensor([0.0, 0.4]), expected)
    assert found.relative == pytest.approx(0.05)
    assert found.largest == 8.0


def test_the_ratio_reveals_a_wrong_factor() -> None:
    expected = torch.randn(5, generator=torch.Generator().manual_seed(0))
    assert Difference.of("loss", "l", 4 * expected, expected).ratio == pytest.approx(4)


def test_what_is_below_the_floor_is_rounding() -> None:
    noise, zero = torch.tensor([1e-9]), torch.zeros(1)
    assert Difference.of("gradient", "g", noise, zero, floor=1e-3).relative < 1e-5
    assert math.isinf(Difference.of("gradient", "g", noise, zero).relative)


@pytest.mark.parametrize(
    ("got", "expected", "text"),
    [
        (torch.zeros(2), torch.zeros(3), "shape [2] instead of [3]"),
        (None, torch.zeros(3), "the pipeline has none"),
        (torch.zeros(3), None, "the model has none"),
    ],
)
def test_what_cannot_be_compared_says_why(
    got: torch.Tensor | None, expected: torch.Tensor | None, text: str
) -> None:
    found = report(Difference.of("output", "o", got, expected))
    assert not found.is_equal
    assert text in str(found)


def test_not_a_number_is_wrong_and_comes_first() -> None:
    bad = Difference.of("output", "bad", torch.tensor([math.nan]), torch.ones(1))
    far = Difference.of("gradient", "far", torch.tensor([2.0]), torch.ones(1))
    found = report(far, bad)
    assert [d.name for d in found.wrong] == ["bad", "far"]


def test_the_table_has_the_worst_of_each_kind_and_all_that_is_wrong() -> None:
    one = torch.ones(1)
    near = Difference.of("gradient", "a.weight", one + 1e-6, one)
    far = Difference.of("gradient", "b.weight", one * 2, one)
    text = str(report(near, far, Difference.of("loss", "loss", one, one)))
    assert text.splitlines() == [
        "t",
        "           compared  wrong    worst      name",
        "losses            1      0  0.0e+00      loss",
        "gradients         2      1  1.0e+00  b.weight",
        "wrong              difference  largest  relative  ratio",
        "gradient b.weight     1.0e+00  1.0e+00   1.0e+00      2",
    ]
    assert str(report(near)).endswith("equal: nothing differs by more than 1e-04")


def test_a_long_table_is_cut() -> None:
    one = torch.ones(1)
    rows = [Difference.of("gradient", f"p{i}", one * 3, one) for i in range(23)]
    assert str(report(*rows)).endswith("and 3 more")
