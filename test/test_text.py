"""Numbers and types are short texts."""

import pytest
import torch

from torch_xla_pp.text import bytes_text, count_text, seconds_text, type_text

pytestmark = pytest.mark.pure


def test_a_type_is_a_dtype_and_a_shape_as_far_as_they_are_known() -> None:
    assert type_text(torch.Size([2, 3]), torch.bfloat16) == "bfloat16[2, 3]"
    assert type_text((), torch.bool) == "bool[]"
    assert type_text(None, torch.int64) == "int64"
    assert type_text(None, None) == ""


@pytest.mark.parametrize(
    ("count", "size", "number"),
    [
        (0, "0 B", "0"),
        (1023, "1023 B", "1.0K"),
        (1536, "1.5 KiB", "1.5K"),
        (200 << 20, "200 MiB", "210M"),
        (3 << 60, "3145728 TiB", "3459P"),
    ],
)
def test_counts_are_in_the_largest_unit_that_fits(
    count: int, size: str, number: str
) -> None:
    assert bytes_text(count) == size
    assert count_text(count) == number


def test_times_are_in_the_largest_unit_that_fits() -> None:
    texts = [seconds_text(value) for value in (0, 2e-8, 0.00125, 2, -3)]
    assert texts == ["0 s", "20 ns", "1.25 ms", "2 s", "-3 s"]
