"""Examples get the rows that were planned."""

from collections import namedtuple

import numpy as np
import pytest
from planner_models import gpt

from torch_xla_pp.planner import make_plan
from torch_xla_pp.planner.example_rows import with_rows

pytestmark = pytest.mark.pure

Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_rows_are_left_out_or_repeated(rows: int) -> None:
    x = np.arange(6).reshape(3, 2)
    found = with_rows((x,), rows)[0]
    assert found.tolist() == [x[place % 3].tolist() for place in range(rows)]


def test_nested_values_of_the_batch_change_and_others_stay() -> None:
    x, table, scale = np.ones((2, 4)), np.zeros((5, 2)), np.float64(3.0)
    values = (Pair(x, [table]), {"x": x, "scale": scale, "name": "a"})
    pair, named = with_rows(values, 4)
    assert isinstance(pair, Pair) and pair.left.shape == (4, 4)
    assert pair.right[0] is table
    assert named["x"].shape == (4, 4)
    assert named["scale"] is scale and named["name"] == "a"


def test_values_without_rows_are_returned() -> None:
    assert with_rows(("a", 3), 4) == ("a", 3)


def test_a_plan_gives_examples_of_its_rows() -> None:
    plan = make_plan(gpt(2, 64, 32), rows=24, ranks=2, microbatches=(4,))
    (found,) = plan.example((np.zeros((5, 32)),))
    assert found.shape == (plan.batch.rows_per_microbatch, 32)
