"""The values that a stage's programs exchange with other ranks themselves.

A program receives first and sends last. A *border* lists the values of one message; a
*route* names the message and its destination at run time (see `ProgramOps`). The
*token* keeps the ops: a program with borders returns one token for all.

Values are kept by name, as in all of `compile`. Received values are used like inputs;
sent values are those that the function computes, takes or receives. They need not be
inputs or outputs of the program: a value that is only sent never becomes a buffer of
its own.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.names import TOKEN, route_in, route_out
from torch_xla_pp.transport import ProgramOps, ShardLayout


class Border(NamedTuple):
    """The values of one message, in its order.

    Attributes:
        stage: The stage on the other side.
        names: What the values are called in the functions of a stage; None for a
            value that nothing computes, which is sent as zeros.
        layouts: Their layouts on the devices of this rank.
        ops: What sends or receives them.
    """

    stage: int
    names: tuple[str | None, ...]
    layouts: tuple[ShardLayout, ...]
    ops: ProgramOps

    def renamed(self, names: Mapping[str, str | None]) -> "Border":
        """Return the border with a function's own names for its values."""
        return self._replace(names=tuple(n and names.get(n) for n in self.names))


def receive(border: Border, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the receiving of all values to the graph.

    Args:
        border: What to receive.
        values: What the program has so far, including the route.

    Returns:
        The values that have a name, and a token.
    """
    route = values[route_in(border.stage)]
    received, token = border.ops.receive_op(route, border.layouts)
    named = zip(border.names, received, strict=True)
    return {TOKEN: token, **{name: v for name, v in named if name is not None}}


def send(border: Border, values: Mapping[str, Tensor]) -> Tensor:
    """Add the sending of values to the graph; return a token."""
    tensors = [
        _zeros(layout) if name is None else values[name]
        for name, layout in zip(border.names, border.layouts, strict=True)
    ]
    route = values[route_out(border.stage)]
    return border.ops.send_op(route, tensors, border.layouts)


def border_names(borders: Iterable[Border]) -> list[str]:
    """Return the names that borders have."""
    return [name for border in borders for name in border.names if name is not None]


def _zeros(layout: ShardLayout) -> Tensor:
    return torch.zeros(layout.shape, dtype=layout.dtype, device=xla_compat.device())
