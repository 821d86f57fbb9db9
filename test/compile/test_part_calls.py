"""On several devices a library computes each device's part, where that is known."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import gelu, log_softmax, softmax

from torch_xla_pp import AxisRules, xla_compat
from torch_xla_pp.compile import Function, Program, ProgramSpec, rules_of
from torch_xla_pp.compile.layer_norm import layer_norm
from torch_xla_pp.compile.lowering import Lowering
from torch_xla_pp.graph import ATTENTION, ATTENTION_BACKWARD
from torch_xla_pp.hlo import product_flops
from torch_xla_pp.mesh import Partition
from torch_xla_pp.world import World

pytestmark = pytest.mark.xla

_aten = torch.ops.aten
X = torch.randn(4, 6, 64, generator=torch.Generator().manual_seed(0))
Y = X.flip(0) * 0.5 + 1
ROW = X[0, 0] + 2
FIRST: Partition = ("data", None, None)
SECOND: Partition = (None, "data", None)
LAST: Partition = (None, None, "data")
WHOLE: Partition = (None,)


def norm(x: Tensor, factor: Tensor) -> Tensor:
    return layer_norm(x, [64], factor, factor)


def norm_grads(x: Tensor, factor: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    x, factor = x.detach().requires_grad_(), factor.detach().requires_grad_()
    return torch.autograd.grad(norm(x, factor), [x, factor], grad)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ATTENTION(query, key, value, None, True, 0.5, [])[0]  # type: ignore[no-any-return]


def attention_grads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    kept = ATTENTION(query, key, value, None, False, 0.5, [])
    given = query, key, value, None, *kept, False, 0.5, []
    return tuple(ATTENTION_BACKWARD(kept[0].cos(), *given))


def attention_in_place(joined: Tensor) -> Tensor:
    """Attend with queries, keys and values that lie in one value."""
    heads = joined.unflatten(-1, (2, 96)).transpose(1, 2)
    query, key, value = heads.split(32, -1)
    return attention(query, key, value)


def masked(query: Tensor, mask: Tensor) -> Tensor:
    return ATTENTION(query, query, query, mask, False, 0.5, [])[0]  # type: ignore[no-any-return]


HEADS = torch.randn(4, 2, 8, 16, generator=torch.Generator().manual_seed(1))
JOINED = torch.randn(4, 8, 192, generator=torch.Generator().manual_seed(2))
MASK = (
    torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(3)) > 0.3
).logical_or(torch.eye(8).bool())
BATCH: Partition = ("data", None, None, None)
BY_HEAD: Partition = (None, "data", None, None)
BY_PLACE: Partition = (None, None, "data", None)

# A function, its arguments, how these are split, and the calls that are expected.
CASES: dict[str, tuple[Callable[..., Any], Sequence[tuple[Tensor, Partition]], str]] = {
    "gelu by rows": (gelu, [(X, FIRST)], "gelu"),
    "gelu by columns": (gelu, [(X, LAST)], "gelu"),
    "gelu of what is whole": (gelu, [(X, (None, None, None))], "gelu"),
    "gelu of what does not divide": (gelu, [(X[:3], FIRST)], ""),
    "gelu of a view": (lambda x: gelu(x.reshape(24, 64)), [(X, FIRST)], "gelu"),
    "gelu of a merged dimension": (
        lambda x: gelu(x.reshape(24, 64)),
        [(X, SECOND)],
        "",
    ),
    "gradient of gelu": (
        _aten.gelu_backward.default,
        [(Y, FIRST), (X, FIRST)],
        "gelu_grad",
    ),
    "gradient of gelu, one of its operands whole": (
        _aten.gelu_backward.default,
        [(Y, (None, None, None)), (X, FIRST)],
        "",
    ),
    "gradient of gelu, split in unlike ways": (
        _aten.gelu_backward.default,
        [(Y, FIRST), (X, SECOND)],
        "",
    ),
    "gelu of six dimensions": (
        lambda x: gelu(x.reshape(4, 2, 3, 2, 4, 8)),
        [(X, FIRST)],
        "",
    ),
    "softmax by rows": (lambda x: softmax(x, -1), [(X, SECOND)], "softmax"),
    "softmax along what is split": (lambda x: softmax(x, -1), [(X, LAST)], ""),
    "gradient of softmax": (
        lambda x, y: _aten._softmax_backward_data.default(x, y, -1, torch.float32),
        [(X, FIRST), (Y, FIRST)],
        "softmax_grad",
    ),
    "log softmax by rows": (lambda x: log_softmax(x, -1), [(X, SECOND)], "softmax"),
    "gradient of log softmax": (
        lambda x, y: _aten._log_softmax_backward_data.default(
            x, -y.abs(), -1, torch.float32
        ),
        [(X, FIRST), (Y, FIRST)],
        "softmax_grad",
    ),
    "gradient of softmax, one of its operands whole": (
        lambda x, y: _aten._softmax_backward_data.default(x, y, -1, torch.float32),
        [(X, FIRST), (Y, (None, None, None))],
        "",
    ),
    "gradients of a norm, that of its result whole": (
        norm_grads,
        [(X, FIRST), (ROW, WHOLE), (Y, (None, None, None))],
        "norm sum",
    ),
    "sum of a whole and a split value": (
        lambda x, y: (x + y).sum((0, 1)),
        [(torch.cat([X] * 20), FIRST), (torch.cat([Y] * 20), (None, None, None))],
        "sum",
    ),
    "norm by rows": (norm, [(X, FIRST), (ROW, WHOLE)], "norm"),
    "norm along what is split": (norm, [(X, LAST), (ROW, WHOLE)], ""),
    "norm with a split factor": (norm, [(X, FIRST), (ROW, ("data",))], "norm"),
    "gradients of a norm": (
        norm_grads,
        [(X, SECOND), (ROW, WHOLE), (Y, SECOND)],
        "norm norm_factor_grad norm_grad",
    ),
    "gradients of a norm along what is split": (
        norm_grads,
        [(X, LAST), (ROW, WHOLE), (Y, LAST)],
        "norm_factor_grad",
    ),
    "sum over what is split": (
        lambda x: x.reshape(-1, 64).sum(0),
        [(torch.cat([X] * 4), FIRST)],
        "sum",
    ),
    "sum by rows": (lambda x: x.sum(-1, keepdim=True), [(X, FIRST)], "sum"),
    "mean by rows": (lambda x: x.mean(-1), [(X, SECOND)], "sum"),
    "mean over what is split": (lambda x: x.mean(-1), [(X, LAST)], ""),
    "attention by batch": (attention, [(HEADS, BATCH)] * 3, "attention"),
    "attention by heads": (attention, [(HEADS, BY_HEAD)] * 3, "attention"),
    "attention by places": (attention, [(HEADS, BY_PLACE)] * 3, ""),
    "attention of unlike parts": (
        attention,
        [(HEADS, BATCH), (HEADS, BATCH), (HEADS, BY_HEAD)],
        "",
    ),
    "attention in one value": (attention_in_place, [(JOINED, FIRST)], "attention"),
    "gradients of attention by batch": (
        attention_grads,
        [(HEADS, BATCH)] * 3,
        "attention attention_grad",
    ),
    "gradients of attention by heads": (
        attention_grads,
        [(HEADS, BY_HEAD)] * 3,
        "attention attention_grad",
    ),
    "attention with a mask": (masked, [(HEADS, BATCH), (MASK, BATCH)], "attention"),
    "attention with a whole mask": (
        masked,
        [(HEADS, BATCH), (MASK, (None,) * 4)],
        "",
    ),
}


def test_products_of_attention_are_counted(mesh: Any) -> None:
    world = World(mesh, None, AxisRules(axes={}))
    module = make_fx(attention_grads)(HEADS, HEADS, HEADS)
    values = [world.place(HEADS, BATCH) for _ in range(3)]
    found = Lowering(module, "test", rules_of(world)).run(*values)
    batch, heads, length, width = HEADS.shape
    sizes = batch // 2 * heads * length * length * width
    assert product_flops(xla_compat.hlo_text(list(found))) == (2 + 5) * 2 * sizes


@pytest.mark.parametrize("case", CASES)
def test_parts_are_those_of_the_whole(mesh: Any, case: str) -> None:
    call, given, expected = CASES[case]
    tensors = [value.clone() for value, _ in given]
    world = World(mesh, None, AxisRules(axes={}))

    def listed(*args: Tensor) -> list[Tensor]:
        found = call(*args)
        return [found] if isinstance(found, Tensor) else list(found)

    module, want = make_fx(listed)(*tensors), listed(*tensors)
    names = tuple(f"x{i}" for i in range(len(given)))
    outputs = tuple(f"out{i}" for i in range(len(want)))
    function = Function(name="test", module=module, inputs=names, outputs=outputs)
    program = Program(ProgramSpec(function=function, rules=rules_of(world)))
    values = [world.place(value, partition) for value, partition in given]
    got = program(dict(zip(names, values, strict=True)))
    for name, value in zip(outputs, want, strict=True):
        torch.testing.assert_close(got[name].cpu(), value, rtol=2e-5, atol=2e-5)
    found = Lowering(module, "test", rules_of(world)).run(*values)
    text = xla_compat.hlo_text(found)
    called = re.findall(r'"torch_xla_pp\.([a-z_]+)\.', text)
    assert sorted({x for x in called if x != "product"}) == expected.split()
