"""Operations are equal where they do the same, whatever the batch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torch_xla_pp.graph.op_digests import describe_op, digest_ops

pytestmark = pytest.mark.pure


class Model(nn.Module):
    def __init__(self, run: Callable[[Tensor], Tensor], width: int = 6) -> None:
        super().__init__()
        self.layer = nn.Linear(6, width)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layer(x))


def digests(run: Callable[[Tensor], Tensor], rows: int = 4, width: int = 6) -> object:
    exported = torch.export.export_for_training(
        Model(run, width), (torch.zeros(rows, 6),)
    )
    graph = exported.module().graph
    return digest_ops(graph, [x for x in graph.nodes if x.op == "call_function"])


def viewed(x: Tensor) -> Tensor:
    return x.view(x.shape[0] * 2, 3).softmax(1).sum(-1).view(x.shape[0], 2)


def test_the_rows_of_a_batch_do_not_count() -> None:
    assert digests(viewed) == digests(viewed, rows=8)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x.relu(), lambda x: x.tanh()),
        (lambda x: x.softmax(0), lambda x: x.softmax(1)),
        (lambda x: x.softmax(-1), lambda x: x.softmax(-2)),
        (lambda x: x.transpose(0, 1), lambda x: x.transpose(1, 0).flip(0)),
        (lambda x: x * 2.0, lambda x: x * 3.0),
        (lambda x: x.double(), lambda x: x.bfloat16()),
        (lambda x: x.sum(0), lambda x: x.sum(0, keepdim=True)),
        (lambda x: x.relu() - x, lambda x: x - x.relu()),
        (lambda x: (x.relu(), x), lambda x: (x, x.relu())),
    ],
)
def test_what_else_is_done_counts(
    one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]
) -> None:
    assert digests(one) != digests(other)


def test_the_shapes_of_parameters_count() -> None:
    assert digests(torch.relu) != digests(torch.relu, width=7)


def test_an_operation_is_described_with_what_counts() -> None:
    exported = torch.export.export_for_training(
        Model(lambda x: x.softmax(1)), (torch.zeros(4, 6),)
    )
    linear, softmax = (
        x for x in exported.module().graph.nodes if x.op == "call_function"
    )
    assert describe_op(linear) == (
        "aten.linear.default(x, layer.weight float32[6, 6], layer.bias float32[6])"
        " -> float32 of 2 dimensions"
    )
    assert describe_op(softmax).startswith("aten.softmax.int(linear, dim=1")
