"""The work of a model is what its stages are, however it is split."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from planned_models import (
    GPT,
    NAMES,
    ROWS,
    WIDTH,
    Branches,
    batch_of,
    model_of,
    plan_of,
)
from torch import Tensor, nn
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.graph import StageGraph
from torch_xla_pp.tracing import trace_work
from torch_xla_pp.work import Work, WorkGraph

pytestmark = pytest.mark.xla


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
    args = batch_of("gpt")
    work = trace_work(GPT(), args, max_stages=4)
    assert [x.module for x in work.works] == [
        *("embed", "", "blocks.0", "blocks.1", "blocks.1"),
        *("blocks.2", "blocks.2", "head"),
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
    assert few.op_digests == many.op_digests
    assert few == dataclasses.replace(many, rows=ROWS)


def test_the_digest_is_of_the_model_and_not_of_its_works() -> None:
    few, many = (
        trace_work(GPT(1), batch_of("gpt"), max_stages=count) for count in (1, 32)
    )
    assert len(few.works) < len(many.works)
    assert few.digest == many.digest


def held_by(work: WorkGraph, part: Sequence[Work]) -> list[float]:
    """Return what a part keeps from F to B, and to W with forwards run again or not."""
    names, last = {one.name for one in part}, set()
    found = [0.0, 0.0, 0.0]
    for one in part:
        values = (v for v in work.values if v.producer == one.name)
        is_last = not any(names & set(value.users) for value in values)
        last |= {one.name} if is_last else set()
        amounts = [one.saved["none"], one.passed["none"]]
        amounts.append(one.passed["full" if is_last else "none"])
        found = [x + amount.of(ROWS) for x, amount in zip(found, amounts, strict=True)]
    for value in work.values:
        size = value.size.of(ROWS)
        found[0] += size if names & set(value.kept_by) else 0
        found[1] += size if names & set(value.passed_by) else 0
        again = names & set(value.passed_by) or last & set(value.passed_again_by)
        found[2] += size if again else 0
    return found


def test_the_works_of_an_mlp_keep_together_what_one_that_is_all_of_it_keeps() -> None:
    few, many = (
        trace_work(GPT(), batch_of("gpt"), max_stages=count) for count in (4, 16)
    )
    found = [one for one in few.works if any("gelu" in op for op in one.ops)]
    assert len(found) == 3
    for whole in found:
        parts = [one for one in many.works if set(one.ops) <= set(whole.ops)]
        assert len(parts) > 1
        assert held_by(many, parts) == held_by(few, [whole])


def test_what_a_backward_of_inputs_does_not_read_is_told() -> None:
    """A linear layer's does not read its input, and a sum's reads neither operand."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(x + F.gelu(self.first(x)))

    work = trace_work(Model(), (torch.randn(ROWS, WIDTH),), max_stages=1000)
    unread = {value.name: value.unread_by for value in work.values if value.users}
    assert unread == {
        "x": ("linear", "add"),
        "linear": (),
        "gelu": ("add",),
        "add": ("linear_1",),
    }


@pytest.mark.parametrize("name", NAMES)
def test_works_add_up_to_the_stages_of_any_split(name: str) -> None:
    model, args = model_of(name), batch_of(name)
    work = trace_work(model, args)
    assert WorkGraph.from_json(work.to_json()) == work
    cuts = ways_to_cut(work, 3)
    for parts in cuts:
        pipe = xpp.pipeline(model, args, plan=plan_of(work, parts))
        assert sizes_of(work, parts) == sizes_in(pipe.stage_graph), parts


class Product(torch.autograd.Function):
    """A product with a constant of its own, and a backward of two products."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight + torch.arange(4.0, device=x.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class ByHand(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(self.first(x), self.second.weight)


def test_a_function_with_its_own_backward_counts_as_what_it_does() -> None:
    work = trace_work(ByHand(), (torch.ones(2, 4),))
    product = 2 * 2 * 4 * 4
    assert sum(x.forward.of(work.rows)[0] for x in work.works) == 2 * product
    assert work.unknown_ops == {}
