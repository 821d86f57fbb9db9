"""Times of works add up to those of the stages that they run in."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_xla_pp.schedule import Kind
from torch_xla_pp.simulate import even_stages, scaled_seconds

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
START_S = 0.5
times = st.floats(min_value=START_S + 0.01, max_value=50)


def seconds_of(rows: Sequence[Sequence[float]]) -> dict[tuple[int, Kind], float]:
    """Return times from rows of F, B, I, W."""
    return {
        (n, kind): seconds
        for n, row in enumerate(rows)
        for kind, seconds in zip(KINDS, row, strict=True)
    }


@given(
    works=st.lists(st.tuples(times, times, times, times), min_size=1, max_size=12),
    stages=st.lists(st.tuples(times, times, times, times), min_size=4, max_size=4),
)
def test_works_and_a_start_are_as_long_as_their_stage(works, stages) -> None:
    apart = seconds_of(works)
    homes = even_stages(apart, len(works), 4)
    assert homes[0] == 0 and sorted(homes) == list(homes)
    assert {*homes} == {*range(1 + homes[-1])} and homes[-1] < 4
    found = scaled_seconds(apart, seconds_of(stages), homes, START_S)
    for stage in {*homes}:
        for place, kind in enumerate(KINDS):
            own = sum(found[n, kind] for n, home in enumerate(homes) if home == stage)
            assert own + START_S == pytest.approx(stages[stage][place])


def test_works_of_a_stage_without_inputs_gradients_are_scaled_as_the_others() -> None:
    apart = seconds_of([(3, 5, 3, 3)] * 4)
    # The first stage sends no gradient: its I is nothing, and its W all of B.
    together = seconds_of([(4.5, 8.5, 0, 8.5), (4.5, 8.5, 3, 5.5)])
    found = scaled_seconds(apart, together, (0, 0, 1, 1), START_S)
    for work in range(4):
        expected = [2.0, 4.0, 1.25, 2.5]
        assert [found[work, kind] for kind in KINDS] == pytest.approx(expected)


def test_times_next_to_nothing_do_not_scale_those_of_a_stage_without_inputs() -> None:
    # W of the second stage takes next to nothing, and thrice as long in the stage.
    apart = seconds_of([(3, 5, 3, 3), (3, 3.01, 3, 0.51)])
    together = seconds_of([(3, 4.1, 0, 4.1), (3, 3.03, 3, 0.53)])
    found = scaled_seconds(apart, together, (0, 1), START_S)
    assert found[0, "W"] == pytest.approx(2.5 * 3.6 / 4.5)
    assert found[1, "W"] == pytest.approx(0.03)


def test_a_single_stage_scales_i_and_w_as_b() -> None:
    apart = seconds_of([(3, 5, 3, 3)] * 2)
    together = seconds_of([(4.5, 5.0, 0, 5.0)])
    found = scaled_seconds(apart, together, (0, 0), START_S)
    assert [found[1, kind] for kind in KINDS] == pytest.approx([2, 2.25, 1.25, 1.25])


def test_runs_take_about_as_long() -> None:
    apart = seconds_of([(1, 1, 0, 0)] * 6 + [(6, 6, 0, 0)])
    assert even_stages(apart, 7, 4) == (0, 0, 0, 1, 1, 1, 2)
    assert even_stages(seconds_of([(0, 0, 0, 0)]), 1, 4) == (0,)
