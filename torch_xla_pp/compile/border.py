"""What a program exchanges with other ranks, as its own first and last operations.

A program with borders receives values where a function has inputs, and sends values
that the function makes or passes through. Neither need be inputs or outputs of the
program: a value that is only sent never becomes a buffer of its own.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.transport import ShardLayout, receive_op, send_op

ROUTE_IN = "route:in"
ROUTE_OUT = "route:out"
TOKEN = "token"


class Border(NamedTuple):
    """List the values of one message, in its order.

    Attributes:
        names: What the values are called in the functions of a stage; None for a
            value that nothing computes, which is sent as zeros.
        layouts: How they lie on the devices of this rank.
    """

    names: tuple[str | None, ...]
    layouts: tuple[ShardLayout, ...]


def receive(border: Border, route: Tensor) -> dict[str, Tensor]:
    """Add the receiving of all values to the graph.

    Returns:
        The values that have a name, and the token.
    """
    values, token = receive_op(route, border.layouts)
    named = zip(border.names, values, strict=True)
    return {TOKEN: token, **{name: v for name, v in named if name is not None}}


def send(border: Border, route: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """Add the sending of values to the graph, behind a receive if there is one.

    Returns:
        The token of both.
    """
    tensors = [
        _zeros(layout) if name is None else values[name]
        for name, layout in zip(border.names, border.layouts, strict=True)
    ]
    return send_op(route, tensors, border.layouts, values.get(TOKEN))


def names_of(border: Border | None) -> Sequence[str]:
    """Return the names that a border has."""
    return [] if border is None else [name for name in border.names if name is not None]


def _zeros(layout: ShardLayout) -> Tensor:
    return torch.zeros(layout.shape, dtype=layout.dtype, device=xla_compat.device())
