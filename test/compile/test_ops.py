"""Each operation of the table of views does what the table says of it."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from torch_xla_pp.compile.ops import VIEWS, is_transpose, permutation

pytestmark = pytest.mark.pure

aten = torch.ops.aten
X = torch.arange(24.0).reshape(2, 3, 1, 4)
MATRIX = X.reshape(6, 4)

# Operation → a value and further arguments, all with dimensions from both ends.
USES: dict[Any, list[tuple[Tensor, tuple[Any, ...]]]] = {
    aten.alias.default: [(X, ())],
    aten.detach.default: [(X, ())],
    aten.expand.default: [(X, ([2, 3, 5, 4],)), (X, ([7, 2, 3, -1, 4],))],
    aten.permute.default: [(X, ([2, 0, 3, 1],)), (X, ([-1, 0, -2, 1],))],
    aten.select.int: [(X, (1, 2)), (X, (-1, -1))],
    aten.slice.Tensor: [(X, (1, 1)), (X, (-1, 0, 4, 2)), (X, ())],
    aten.split.Tensor: [(X, (2, 1)), (X, (1,))],
    aten.split_with_sizes.default: [(X, ([1, 3], -1)), (X, ([1, 1],))],
    aten.squeeze.default: [(X, ())],
    aten.squeeze.dim: [(X, (2,)), (X, (0,))],
    aten.squeeze.dims: [(X, ([-2, 0],))],
    aten.t.default: [(MATRIX, ()), (MATRIX[0], ())],
    aten.transpose.int: [(X, (0, 3)), (X, (-1, 1)), (X, (1, 1))],
    aten.unbind.int: [(X, (-1,)), (X, ())],
    aten.unsqueeze.default: [(X, (1,)), (X, (-1,))],
    aten.view.default: [(X, ([6, 4],)), (X, ([4, -1],))],
    aten._unsafe_view.default: [(X, ([6, 4],))],
}


def node_of(op: Any, args: Sequence[Any]) -> fx.Node:
    graph = fx.Graph()
    return graph.call_function(op, (graph.placeholder("x"), *args))


def is_of_form(op: Any, value: Tensor, args: Sequence[Any]) -> bool:
    """Tell if what an operation makes of a value is of its form in the table."""
    result = op(value, *args)
    first = result if isinstance(result, Tensor) else torch.tensor([])
    without_ones = [size for size in value.shape if size != 1]
    match VIEWS[op]:
        case "same":
            return torch.equal(first, value)
        case "expand":
            return torch.equal(first, value.expand(first.shape))
        case "permute":
            order = permutation(node_of(op, args), value.dim())
            return torch.equal(first, value.permute(order))
        case "view":
            return torch.equal(first.flatten(), value.flatten())
        case "squeeze":
            is_alike = [size for size in first.shape if size != 1] == without_ones
            return is_alike and torch.equal(first.flatten(), value.flatten())
        case "select":
            rest = (size for i, size in enumerate(value.shape) if i != args[0] % 4)
            return list(first.shape) == list(rest)
        case "slice":
            return first.dim() == value.dim() and first.numel() <= value.numel()
        case "pieces":
            return math.fsum(piece.numel() for piece in result) == value.numel()


def test_every_operation_is_of_its_form() -> None:
    assert USES.keys() == VIEWS.keys()
    wrong = [
        (op, args)
        for op, uses in USES.items()
        for value, args in uses
        if not is_of_form(op, value, args)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("op", "args", "count", "is_one"),
    [
        (aten.t.default, (), 2, True),
        (aten.t.default, (), 1, False),
        (aten.transpose.int, (1, 2), 3, True),
        (aten.transpose.int, (-1, -2), 3, True),
        (aten.transpose.int, (0, 1), 3, False),
        (aten.transpose.int, (1, 1), 2, False),
        (aten.permute.default, ([0, 2, 1],), 3, True),
        (aten.permute.default, ([-1, 0],), 2, True),
        (aten.permute.default, ([0, 1],), 2, False),
        (aten.view.default, ([4, 6],), 2, False),
    ],
)
def test_a_transpose_swaps_the_last_two_dimensions(
    op: Any, args: Any, count: int, is_one: bool
) -> None:
    assert is_transpose(node_of(op, args), count) is is_one
