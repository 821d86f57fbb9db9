"""Costs are scaled to a step that ran."""

import pytest

from torch_xla_pp.schedule import one_f_one_b, zb1p
from torch_xla_pp.simulate import Calibration, Costs, simulate

pytestmark = pytest.mark.pure


def test_costs_come_to_what_was_recorded() -> None:
    stated = Costs.uniform(2, forward_s=1.0, input_s=1.0, weight_s=1.0)
    true = Costs.uniform(2, forward_s=3.0, input_s=1.0, weight_s=3.0)
    schedule = one_f_one_b(2, 4)
    found = Calibration.of(stated, simulate(schedule, true))
    assert found.factors["F"] == pytest.approx(3.0)
    assert found.factors["B"] == pytest.approx(2.0)
    scaled = found.scaled(stated)
    again = simulate(schedule, scaled)
    assert again.step_s == pytest.approx(simulate(schedule, true).step_s)


def test_kinds_that_were_not_recorded_take_the_factor_of_all_that_were() -> None:
    stated = Costs.uniform(2, forward_s=1.0, input_s=1.0, weight_s=2.0)
    true = Costs.uniform(2, forward_s=5.0, input_s=3.0, weight_s=4.0)
    found = Calibration.of(stated, simulate(one_f_one_b(2, 4), true))
    assert found.factors["I"] == found.factors["W"] == pytest.approx(12 / 4)
    split = Calibration.of(stated, simulate(zb1p(2, 4, 1), true)).factors
    assert split["I"] == pytest.approx(3) and split["W"] == pytest.approx(2)


def test_a_step_of_other_stages_is_refused() -> None:
    recorded = simulate(one_f_one_b(3, 4), Costs.uniform(3))
    with pytest.raises(ValueError, match="expected a recorded step of the 2 stages"):
        Calibration.of(Costs.uniform(2), recorded)
    with pytest.raises(ValueError, match="expected factors above 0, got F: 0"):
        Calibration(factors={"F": 0.0})
