"""The mean time of steps whose actions vary."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_xla_pp.schedule import Schedule, gpipe, one_f_one_b, zb1p
from torch_xla_pp.simulate import (
    Costs,
    expected_step_s,
    measured_costs,
    simulate,
)

pytestmark = pytest.mark.pure


@given(
    schedule=st.sampled_from([gpipe(2, 3), one_f_one_b(3, 4), zb1p(2, 4)]),
    times=st.tuples(*[st.integers(1, 9)] * 3),
)
def test_equal_samples_take_as_long_as_their_mean(
    schedule: Schedule, times: tuple[int, ...]
) -> None:
    forward_s, input_s, weight_s = times
    costs = Costs.uniform(
        schedule.num_stages, forward_s=forward_s, input_s=input_s, weight_s=weight_s
    )
    alike = replace(costs, samples={key: (s, s) for key, s in costs.seconds.items()})
    expected = simulate(schedule, costs).step_s
    assert expected_step_s(schedule, costs) == pytest.approx(expected)
    assert expected_step_s(schedule, alike) == pytest.approx(expected)


def test_the_mean_over_all_cases_is_approached() -> None:
    # Two stages, two microbatches, forwards that take 1 or 3: 16 cases.
    schedule = Schedule.from_csv("0F0,0F1\n1F0,1F1\n")
    costs = Costs.uniform(2, forward_s=2.0)
    varied = replace(costs, samples={(0, "F"): (1.0, 3.0), (1, "F"): (1.0, 3.0)})
    exact = 0.0
    for a, b, c, d in product((1.0, 3.0), repeat=4):
        exact += (max(a + b, a + c) + d) / 16
    assert exact > simulate(schedule, costs).step_s == 6.0
    found = expected_step_s(schedule, varied, num_draws=2000)
    assert found == pytest.approx(exact, rel=0.02)
    assert found == expected_step_s(schedule, varied, num_draws=2000)


def test_steps_that_varied_are_predicted_longer_than_by_their_means() -> None:
    schedule = one_f_one_b(4, 16)
    random = Random(7)
    costs = Costs.uniform(4)
    varied = replace(
        costs, samples={k: (0.5 * s, 1.5 * s) for k, s in costs.seconds.items()}
    )
    steps = [simulate(schedule, varied, random=random) for _ in range(40)]
    measured_s = sum(step.step_s for step in steps) / len(steps)
    found = measured_costs(steps)
    assert simulate(schedule, found).step_s < 0.95 * measured_s
    assert expected_step_s(schedule, found) == pytest.approx(measured_s, rel=0.03)


def test_a_negative_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="sample of 0F: -1"):
        Costs(seconds={(0, "F"): 1.0}, flows=(), samples={(0, "F"): (-1.0,)})
