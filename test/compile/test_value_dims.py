"""Dimensions of values are followed back to those of parameters."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.work import Amount, ParameterDim, Work, WorkGraph

pytestmark = pytest.mark.xla

ROWS, LENGTH, WIDTH, HEADS = 2, 4, 8, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (y.reshape(shape).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


class Gated(nn.Module):
    """An MLP with two products of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16, bias=False)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.block = block

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.norm(self.embed(tokens)))


def work_of(block: nn.Module, max_stages: int = 16) -> WorkGraph:
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    return xpp.trace_work(Model(block), (tokens,), max_stages=max_stages)


def dim(parameter: str, number: int) -> ParameterDim:
    return ParameterDim(parameter=parameter, dim=number)


def sums_over(work: WorkGraph, *dims: ParameterDim) -> list[tuple[str, Amount]]:
    """Return when values are summed over some dimensions, and how large they are."""
    return [
        (one.when, one.size)
        for each in work.works
        for one in each.sums
        if {*dims} & {*one.dims}
    ]


def kept_with(works: tuple[Work, ...], own: ParameterDim) -> Amount:
    parts = [part for work in works for part in work.parts if own in part.dims]
    return sum((part.saved["none"] for part in parts), Amount())


def tokens_of(width: int) -> Amount:
    return Amount(bytes_per_row=4.0 * LENGTH * width)


@pytest.mark.parametrize("max_stages", [1, 16])
def test_heads_are_followed_through_attention(max_stages: int) -> None:
    work = work_of(Attention(), max_stages)
    heads, joined = dim("block.qkv.weight", 0), dim("block.out.weight", 1)
    # The output's product sums over heads, and the gradient of the projection's input.
    assert sorted(sums_over(work, heads, joined)) == [
        ("F", tokens_of(WIDTH)),
        ("I", tokens_of(WIDTH)),
    ]
    # Queries, keys, values, and two numbers of each row of scores; what leaves
    # attention may be a value between works.
    inside = tokens_of(3 * WIDTH) + tokens_of(2 * HEADS)
    between = [v.size for v in work.values if heads in v.dims and v.kept_by]
    kept = sum(between, kept_with(work.works, heads))
    assert kept == inside + tokens_of(WIDTH)


def test_a_gradient_of_which_several_products_have_parts_is_summed_once() -> None:
    work = work_of(Gated(), 1)
    hidden = dim("block.gate.weight", 0), dim("block.up.weight", 0)
    found = sums_over(work, *hidden)
    assert sorted(found) == [
        ("F", tokens_of(WIDTH)),
        ("I", tokens_of(WIDTH)),
    ]


def test_tables_are_looked_up_and_read_forward_alone() -> None:
    work = work_of(Gated())
    found = {p.name: p for each in work.works for p in each.parameters}
    assert found["embed.weight"].looked_up == tokens_of(WIDTH)
    assert found["embed.weight"].read_by == ("F",)
    assert found["block.up.weight"].looked_up is None
    assert found["block.up.weight"].read_by == ("F", "I")
    assert sums_over(work, dim("embed.weight", 0)) == [("F", tokens_of(WIDTH))]


def test_what_views_make_of_dimensions_keeps_the_larger_parts() -> None:
    class Reshaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, 24)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.up(x)
            grouped = y.reshape(*x.shape[:2], 6, 4)
            # Five does not divide what is split into six groups of four.
            mixed = y.flatten(1).reshape(-1, 8, LENGTH * 3)
            return grouped.sum(-1), grouped.sum(-2), mixed.relu()

    values = {v.name: v for v in work_of(Reshaped()).values}
    first, second, third = (values[name] for name in work_of(Reshaped()).outputs)
    up = dim("block.up.weight", 0)
    assert (up in first.dims, up in second.dims) == (True, False)
    assert up not in third.dims


def test_gradients_of_what_the_model_returns_come_whole() -> None:
    def passed_with(own: ParameterDim) -> Amount:
        parts = [part for work in works for part in work.parts if own in part.dims]
        return sum((part.passed["none"] for part in parts), Amount())

    works = work_of(Gated()).works
    assert passed_with(dim("block.down.weight", 0)) == Amount()
    assert passed_with(dim("block.gate.weight", 0)) == tokens_of(16)
    assert passed_with(dim("block.up.weight", 0)) == tokens_of(16)
