"""Stages compute PyTorch's attention as one operation, or as PyTorch does."""

from collections.abc import Callable
from typing import Any

import torch
from pytest import mark
from torch import Tensor, nn
from torch.nn import functional as F

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import export_joint
from torch_xla_pp.compile.attention_calls import has_call
from torch_xla_pp.graph import ATTENTION, ATTENTION_BACKWARD
from torch_xla_pp.testing import Worlds

pytestmark = mark.worlds

SHAPE = (2, 4, 6, 8)
LIKE = (SHAPE, SHAPE, SHAPE)
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attending(nn.Module):
    """Attention by a function of queries, keys and values."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.call(query, key, value)


def targets_of(call: Call, *shapes: tuple[int, ...], dtype: Any, kernels: bool) -> Any:
    """Return the operations of a joint graph."""
    args = [
        torch.zeros(shape, dtype=dtype, device=xla_compat.device(), requires_grad=True)
        for shape in shapes
    ]
    joint = export_joint(Attending(call), args, {}, stays=has_call if kernels else None)
    return {node.target for node in joint.graph.graph.nodes}


def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = torch.ones(6, 6, dtype=torch.bool, device=query.device)
    return F.scaled_dot_product_attention(query, key, value, mask)


def shifted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = torch.ones(6, 6, device=query.device)
    return F.scaled_dot_product_attention(query, key, value, mask)


def dropped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)


def grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.ops.aten.scaled_dot_product_attention.default(
        query, key, value, None, 0.0, True, scale=0.3
    )


def differentiated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    def total(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value).sum()

    return torch.func.grad(total)(query)


def by_autocast(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with torch.autocast("xla", torch.bfloat16):
        return F.scaled_dot_product_attention(query, key, value)


FEWER, WIDER = (2, 2, 6, 8), (2, 4, 6, 16)
CASES: dict[str, tuple[Call, tuple[tuple[int, ...], ...], bool]] = {
    "plain": (F.scaled_dot_product_attention, LIKE, True),
    "causal": (causal, LIKE, True),
    "fewer heads": (grouped, (SHAPE, FEWER, FEWER), True),
    "a mask": (masked, LIKE, True),
    "a mask of numbers": (shifted, LIKE, False),
    "dropout": (dropped, LIKE, False),
    "wider values": (F.scaled_dot_product_attention, (SHAPE, SHAPE, WIDER), False),
    "three dimensions": (F.scaled_dot_product_attention, (SHAPE[1:],) * 3, False),
    "a transform": (differentiated, LIKE, False),
    "autocast": (by_autocast, LIKE, False),
}


def is_there(case: str, dtype: Any, kernels: bool) -> bool:
    xla_compat.enable_spmd()
    call, shapes, _ = CASES[case]
    found = targets_of(call, *shapes, dtype=dtype, kernels=kernels)
    assert (ATTENTION in found) == (ATTENTION_BACKWARD in found)
    return ATTENTION in found


@mark.parametrize("case", CASES)
def test_what_is_attention_stays_one_operation(worlds: Worlds, case: str) -> None:
    (found,) = worlds.run(is_there, ranks=1, args=(case, torch.float32, True))
    assert found == CASES[case][-1]


@mark.parametrize(
    ("devices", "dtype", "kernels"),
    [(1, torch.bfloat16, True), (1, torch.float32, False), (2, torch.float32, False)],
)
def test_without_a_kernel_it_is_plain_operations(
    worlds: Worlds, devices: int, dtype: Any, kernels: bool
) -> None:
    args = ("plain", dtype, kernels)
    (found,) = worlds.run(is_there, ranks=1, devices=devices, args=args)
    assert not found
