"""Masks that are made under vmap, as transformers makes them, in models that are split.

`TransformGetItemToIndex` is what a library puts around code that indexes by elements.
"""

import pytest
import torch
from graph.splitting import Net, pairs, split
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.distributed.pipelining import SplitPoint

pytestmark = pytest.mark.pure


class Masked(nn.Module):
    """A submodule that makes a mask within its own calls of layers."""

    def __init__(self, is_counted: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.is_counted = is_counted

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        x = self.layers[0](x)
        columns = torch.arange(4)
        columns += 1

        def is_seen(row: Tensor, column: Tensor) -> Tensor:
            seen = column <= row + 1
            if self.is_counted:
                seen = seen & kept[row] & kept[column - 1]
            return seen

        with TransformGetItemToIndex():
            over_columns = torch.vmap(is_seen, (None, 0))
            mask = torch.vmap(over_columns, (0, None))(torch.arange(4), columns)
        for layer in self.layers[1:]:
            x = layer(x) @ mask.float()
        return x


@pytest.mark.parametrize(("is_counted", "num_values"), [(False, 1), (True, 2)])
def test_a_mask_is_sent_only_if_it_depends_on_inputs(
    is_counted: bool, num_values: int
) -> None:
    net = Net(lambda net, x, kept: net.layers[0](net.inner(x, kept)))
    net.inner = Masked(is_counted)
    kept = torch.tensor([True, True, False, True])
    spec = {"inner.layers.2": SplitPoint.BEGINNING}
    pipe = split(net, torch.randn(3, 4), kept, split_spec=spec)
    assert len(pipe.stage_graph.sources(1)) == num_values
    names = {name.rpartition(".")[0] for name in pipe.get_stage_module(1).state_dict()}
    assert names == {"inner.layers.2", "layers.0"}


def test_values_with_gradients_stay_vmapped() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        rows = torch.vmap(lambda row, n: row * n + row.sum())
        return net.layers[1](rows(net.layers[0](x), torch.arange(3.0)))

    pipe = split(run, split_spec={"layers.1": SplitPoint.BEGINNING})
    assert pairs(pipe) == "01"


def test_a_constant_may_be_written_in_place_on_its_way() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        scale = torch.ones(4)
        scale.add_(1).mul_(2)
        noise = torch.ones(4).uniform_() * 0
        seen = torch.zeros(4)
        first = seen[:2]
        seen.add_(1)
        for layer in net.layers[:2]:
            x = layer(x) * scale + noise
            x = x + first.sum()
        return x

    pipe = split(run, split_spec={"layers.1": SplitPoint.BEGINNING})
    noise = [edge for edge in pipe.stage_graph.edges if edge.shape == (4,)]
    assert len(noise) == 1
