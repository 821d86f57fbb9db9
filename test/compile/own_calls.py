"""Comparison of functions with the programs in which our library runs parts of them."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import Function, Program, ProgramSpec, library_rules
from torch_xla_pp.compile.lowering import Lowering


def own_calls(module: Any, args: tuple[Tensor, ...]) -> int:
    """Count the calls of ours, but for products, in a graph."""
    device = [value.to(xla_compat.device()) for value in args]
    outputs = Lowering(module, "test", library_rules()).run(*device)
    text = xla_compat.hlo_text(list(outputs))
    return len(re.findall(r'"torch_xla_pp\.(?!product(_bias)?\.)', text))


def check(
    call: Callable[..., tuple[Tensor, ...]],
    *args: Tensor,
    num_calls: int,
    atol: float = 1e-6,
) -> None:
    """Run a function of host tensors as a program, and compare."""
    module = make_fx(call)(*args)
    names = tuple(f"x{i}" for i in range(len(args)))
    want = call(*args)
    outputs = tuple(f"out{i}" for i in range(len(want)))
    function = Function(name="test", module=module, inputs=names, outputs=outputs)
    program = Program(ProgramSpec(function=function, rules=library_rules()))
    values = [value.to(xla_compat.device()) for value in args]
    for _ in range(2):
        got = program(dict(zip(names, values, strict=True)))
        for name, value in zip(outputs, want, strict=True):
            torch.testing.assert_close(
                got[name].cpu(), value, rtol=2e-6, atol=atol, equal_nan=True
            )
    assert own_calls(module, args) == num_calls
