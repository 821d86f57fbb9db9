"""What an axis of the mesh splits is followed through a graph, or known to be lost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torch_xla_pp.compile.axis_places import axis_places
from torch_xla_pp.compile.group_sums.batch_dims import Place
from torch_xla_pp.compile.mesh_parts import partition_at
from torch_xla_pp.mesh import Partition

pytestmark = pytest.mark.pure

LOST = "lost"
X = torch.ones(4, 6, 8)


def places(
    function: Callable[..., Tensor], *inputs: tuple[Tensor, Partition | None]
) -> Any:
    """Return where axes of two devices are in the result of a function."""
    graph = make_fx(function)(*(value.clone() for value, _ in inputs)).graph
    known = dict(
        zip(graph.find_nodes(op="placeholder"), [p for _, p in inputs], strict=True)
    )
    (result,) = graph.output_node().all_input_nodes
    found = axis_places(graph, known, lambda axis: 2)
    return found.get(result, LOST)


def test_rows_and_columns_of_a_product_stay_split() -> None:
    weight = torch.ones(8, 10)
    found = places(torch.matmul, (X, ("data", None, None)), (weight, (None, "model")))
    assert found == {"data": Place(0), "model": Place(2)}


def test_what_is_summed_over_is_split_no_more() -> None:
    weight = torch.ones(8, 10)
    found = places(torch.matmul, (X, (None, None, "model")), (weight, ("model", None)))
    assert found == {}
    assert places(lambda x: x.sum(1), (X, ("data", "model", None))) == {
        "data": Place(0)
    }


def test_merged_dimensions_keep_both_axes() -> None:
    found = places(lambda x: x.reshape(24, 8), (X, ("data", "model", None)))
    assert found == {"data": Place(0), "model": Place(0, outer=4)}
    assert partition_at(found, (4, 6), 3) == ("data", "model", None)
    # Of one dimension in their place there is no partition.
    assert partition_at(found, (24,), 2) is None


def test_operands_that_are_split_in_unlike_ways_lose_the_axis() -> None:
    x, y = (X, ("data", None, None)), (X, (None, "data", None))
    assert places(torch.add, x, x) == {"data": Place(0)}
    assert places(torch.add, x, y) == LOST
    assert places(lambda a, b: (a + b).softmax(-1).sum(0), x, y) == LOST
    left, right = torch.ones(4, 6), torch.ones(6, 10)
    unlike = (left, ("data", None)), (right, (None, "data"))
    assert places(torch.mm, *unlike) == LOST


def test_an_unknown_operand_loses_what_no_other_one_tells() -> None:
    known, unknown = (X, ("data", None, None)), (X, None)
    assert places(torch.exp, unknown) == LOST
    assert places(torch.add, known, unknown) == {"data": Place(0)}
    assert places(lambda x: x.flip(0), known) == {"data": Place(0)}
    assert places(lambda x: x.unfold(0, 2, 1), known) == LOST
