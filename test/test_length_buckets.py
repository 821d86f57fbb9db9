"""Batches of many lengths are filled up to few."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_xla_pp import LengthBuckets

pytestmark = pytest.mark.pure


def filling(sizes: tuple[int, ...], lengths: list[int]) -> int:
    return sum(LengthBuckets(sizes).size(length) - length for length in lengths)


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    count=st.integers(1, 4),
)
def test_sizes_need_the_least_filling_of_all_choices(
    lengths: list[int], count: int
) -> None:
    found = LengthBuckets.fitting(lengths, count).sizes
    known = sorted(set(lengths))
    choices = [
        (*chosen, known[-1])
        for number in range(min(count, len(known)))
        for chosen in combinations(known[:-1], number)
    ]
    assert len(found) <= count
    assert filling(found, lengths) == min(filling(x, lengths) for x in choices)


@given(lengths=st.lists(st.integers(1, 99), min_size=1), count=st.integers(1, 5))
def test_sizes_are_multiples_that_suffice(lengths: list[int], count: int) -> None:
    found = LengthBuckets.fitting(lengths, count, multiple_of=8).sizes
    assert all(size % 8 == 0 for size in found)
    assert max(lengths) <= found[-1] < max(lengths) + 8


def test_tensors_are_filled_up_behind_what_is_there() -> None:
    buckets = LengthBuckets((2, 4))
    x = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert buckets.fill(x, -100).tolist() == [[1, 2, 3, -100], [4, 5, 6, -100]]
    assert buckets.fill(x[:, :1], 0).shape == (2, 2)
    assert buckets.fill(x[..., None], 0).shape == (2, 4, 1)
    assert buckets.fill(x.T, 0, dim=-2).shape == (4, 2)
    assert buckets.mask(x).tolist() == [[True, True, True, False]] * 2


@pytest.mark.parametrize("sizes", [(), (4, 2), (2, 2), (0, 1)])
def test_sizes_that_do_not_rise_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected positive lengths, the shortest"):
        LengthBuckets(sizes)


def test_what_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a length of at most 4, got 5"):
        LengthBuckets((2, 4)).fill(torch.zeros(1, 5), 0)


@pytest.mark.parametrize(("lengths", "count"), [([], 1), ([0], 1), ([3], 0)])
def test_no_lengths_or_no_sizes_are_refused(lengths: list[int], count: int) -> None:
    with pytest.raises(ValueError, match="at least one size"):
        LengthBuckets.fitting(lengths, count)
