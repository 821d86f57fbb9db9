"""The work of a model is what its stages are, however it is split."""

import dataclasses
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integration.training import Model as TiedModel
from torch import Tensor, nn
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.graph import StageGraph
from torch_xla_pp.tracing import trace_work
from torch_xla_pp.work import Work, WorkGraph

pytestmark = pytest.mark.xla

ROWS, LENGTH, WIDTH, VOCAB = 4, 8, 16, 13


class Block(nn.Module):
    """A block with attention under a mask that is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(LENGTH, LENGTH).tril().log()
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) + mask).softmax(-1)
        x = x + self.out(F.dropout(scores @ v, 0.1, self.training))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skipping(nn.Module):
    """Values skip over the middle, as in a U-Net; a norm writes its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e, f = self.layers
        first = a(x).relu()
        second = self.norm(b(first)).relu()
        third = d(c(second).tanh()) + second
        halves = e(third + first).chunk(2, 1)
        return f(torch.cat([halves[1], halves[0]], 1)) * x.sum(1, keepdim=True)


class Branches(nn.Module):
    """Two inputs, a branch for each, and a join; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)
        )
        self.right = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.left(x), self.right(y)
        return self.head(torch.cat([left, right], 1)), left.mean(1)


def example(model: nn.Module) -> tuple[Tensor, ...]:
    if isinstance(model, GPT | TiedModel):
        return (torch.zeros(ROWS, LENGTH, dtype=torch.long),)
    x = torch.randn(ROWS, WIDTH)
    return (x, x) if isinstance(model, Branches) else (x,)


MODELS = {
    "gpt": GPT,
    "tied": lambda: TiedModel(3, is_tied=True),
    "skips": Skipping,
    "branches": Branches,
}


def plan_of(parts: Sequence[Sequence[Work]]) -> Any:
    return SimpleNamespace(
        stages=[
            SimpleNamespace(
                name=f"part {i}", ops=[op for work in part for op in work.ops]
            )
            for i, part in enumerate(parts)
        ]
    )


def sizes_of(work: WorkGraph, parts: Sequence[Sequence[Work]]) -> list[Any]:
    """Return FLOPs and parameters of each stage, and bytes from stage to stage.

    The first stage has the model's inputs, and the last one its outputs.
    """
    home = {part_work.name: i for i, part in enumerate(parts) for part_work in part}
    stages = []
    for part in parts:
        flops = sum(x.forward.of(work.rows)[0] for x in part)
        held = {p.name: p.bytes for x in part for p in x.parameters}
        stages.append((flops, sum(held.values())))
    edges: dict[tuple[int, int], float] = {}
    for value in work.values:
        made = 0 if value.producer is None else home[value.producer]
        users = {home[user] for user in value.users}
        if value.name in work.outputs:
            users.add(len(parts) - 1)
        for user in users - {made}:
            edge = (made, user)
            edges[edge] = edges.get(edge, 0) + value.size.of(work.rows)
    return [stages, edges]


def sizes_in(graph: StageGraph) -> list[Any]:
    """Return the same of stages as they are."""
    edges: dict[tuple[int, int], float] = {}
    for edge in graph.edges:
        pair = (edge.producer, edge.consumer)
        edges[pair] = edges.get(pair, 0) + (edge.bytes or 0)
    return [[(s.flops, s.parameter_bytes) for s in graph.stages], edges]


def ways_to_cut(work: WorkGraph, count: int) -> list[list[list[Work]]]:
    """Return some choices of stages."""
    chance = random.Random(0)
    borders = range(1, len(work.works))
    found = []
    for _ in range(count):
        num_cuts = chance.randint(1, min(3, len(borders)))
        cuts = sorted(chance.sample(borders, num_cuts))
        pairs = zip([0, *cuts], [*cuts, None], strict=True)
        found.append([list(work.works[low:high]) for low, high in pairs])
    return found


def test_equal_blocks_have_two_works_each_and_nothing_of_them_takes_memory() -> None:
    args = example(GPT())
    work = trace_work(GPT(), args, max_stages=4)
    assert [x.module for x in work.works] == [
        *("embed", "", "blocks.0", "blocks.1", "blocks.1"),
        *("blocks.2", "blocks.2", "blocks.3", "blocks.3", "head"),
    ]
    assert len({x.digest for x in work.works}) == 5
    with xpp.deferred_init():
        deferred = GPT()
    assert trace_work(deferred, args, max_stages=4) == work
    assert all(parameter.is_meta for parameter in deferred.parameters())


def test_more_rows_change_nothing_for_each_row() -> None:
    few, many = (
        trace_work(Branches(), tuple(torch.randn(2, rows, WIDTH)))
        for rows in (ROWS, 3 * ROWS)
    )
    assert few.digest == many.digest
    assert few == dataclasses.replace(many, rows=ROWS)


@pytest.mark.parametrize("name", MODELS)
def test_works_add_up_to_the_stages_of_any_split(name: str) -> None:
    model = MODELS[name]()
    args = example(model)
    work = trace_work(model, args)
    assert WorkGraph.from_json(work.to_json()) == work
    cuts = ways_to_cut(work, 3)
    for parts in cuts:
        pipe = xpp.pipeline(model, args, plan=plan_of(parts))
        assert sizes_of(work, parts) == sizes_in(pipe.stage_graph), parts
