"""Medians and quartiles of the benchmarks."""

import spread
from pytest import approx


def test_a_figure_comes_with_its_quartiles() -> None:
    row = spread.medians_of({"step_s": [0.5, 0.1, 0.3, 0.2, 0.4], "count": [2]})
    assert row["step_s"] == approx(0.3)
    assert row["step_s_spread"] == approx((0.15, 0.45))
    assert (row["count"], row["count_spread"]) == (2, (2, 2))
    assert spread.text_of(row, "step_s", ".0f", 1e3) == "300 (150 to 450)"


def test_rounds_are_compared_and_added_one_by_one() -> None:
    assert spread.ratios([3.0, 1.0], [2.0, 4.0]) == [1.5, 0.25]
    assert spread.sums([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]]) == [111.0, 222.0]
