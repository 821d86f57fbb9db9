"""Pytrees are taken apart and put together again."""

import pytest
import torch

from torch_xla_pp.graph import Template

pytestmark = pytest.mark.pure

A, B = torch.ones(2, 3), torch.zeros(4, dtype=torch.int64)


def test_a_tensor_that_is_there_twice_has_one_slot() -> None:
    template, tensors = Template.of({"x": [A, B], "y": A, "n": 3})
    assert [id(tensor) for tensor in tensors] == [id(A), id(B)]
    assert template.num_slots == 2
    assert template.constants == [3]
    assert template.fill(["a", "b"]) == {"x": ["a", "b"], "y": "a", "n": 3}


def test_arguments_that_look_alike_have_equal_templates() -> None:
    template, tensors = Template.of_arguments([A, (A, 3)], {"mask": B})
    assert template.fill(tensors) == ((A, (A, 3)), {"mask": B})
    other, _ = Template.of_arguments([A + 1, (A + 2, 3)], {"mask": B + 1})
    assert other == template
    assert hash(other) == hash(template)
    assert str(template) == "(float32[2, 3], float32[2, 3], 3, int64[4])"


@pytest.mark.parametrize(
    "args",
    [
        (A, (A, 4)),
        (A, (A.double(), 3)),
        (A, (B, 3)),
        (A, [A, 3]),
        (A, (3, A)),
    ],
)
def test_arguments_that_look_different_have_different_templates(
    args: tuple[object, ...],
) -> None:
    template, _ = Template.of_arguments([A, (A, 3)], {"mask": B})
    other, _ = Template.of_arguments(args, {"mask": B})
    assert other != template
