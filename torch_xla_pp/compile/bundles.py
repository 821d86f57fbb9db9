"""Small values that pass between the programs of a stage as one.

A value that a program takes or returns costs torch_xla some microseconds, however small
it is: most of the time in which a program is dispatched. Half of the values that a
transformer's stage saves, and two thirds of its gradients, are those of normalizations
and biases, of a few KiB.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, fx

from torch_xla_pp.compile.names import bundle_name
from torch_xla_pp.compile.partition import Function
from torch_xla_pp.cpu import fits_own_ops, has_own_ops, split

MOST_SMALL_BYTES = 1 << 16


class Bundle(NamedTuple):
    """Small values of one dtype as one flat value.

    Attributes:
        name: The name of the flat value.
        shapes: Name of each small value → its shape.
        total: The name of a flat value to which the small ones are added as they are
            joined, "" for none.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    total: str = ""

    def joined(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the flat value of small ones, and of the total."""
        whole = torch.cat([values[name].reshape(-1) for name in self.shapes])
        return values[self.total] + whole if self.total else whole

    def parts(self, whole: Tensor) -> dict[str, Tensor]:
        """Return the small values of a flat one, by name.

        XLA compiles a loop for each of them, so they are copied by one call where
        programs have these.
        """
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        views = zip(self.shapes.items(), torch.split(whole, sizes), strict=True)
        parts = {name: part.view(shape) for (name, shape), part in views}
        if whole.device.type == "xla" and fits_own_ops(whole) and has_own_ops():
            shapes = {name: one for name, one in self.shapes.items() if math.prod(one)}
            parts |= zip(shapes, split(whole, shapes.values()), strict=True)
        return parts


def bundles_of(
    maker: str, names: Iterable[str], looks: Mapping[str, Tensor]
) -> tuple[Bundle, ...]:
    """Return the bundles of those values that are small, one for each dtype.

    Args:
        maker: What makes the values.
        names: Their names.
        looks: Name → a value of that shape and dtype; others are in no bundle.
    """
    found: dict[torch.dtype, dict[str, tuple[int, ...]]] = {}
    for name in names:
        look = looks.get(name)
        if look is not None and look.numel() * look.dtype.itemsize <= MOST_SMALL_BYTES:
            found.setdefault(look.dtype, {})[name] = tuple(look.shape)
    return tuple(
        Bundle(bundle_name(maker, dtype), shapes)
        for dtype, shapes in found.items()
        if len(shapes) > 1
    )


def looks_of(function: Function) -> dict[str, Tensor]:
    """Return values of the shapes and dtypes that a function's inputs have."""
    module = function.module
    if not isinstance(module, fx.GraphModule):
        return {}
    nodes = module.graph.find_nodes(op="placeholder")
    looks = {n: x.meta["val"] for n, x in zip(function.inputs, nodes, strict=True)}
    return {name: look for name, look in looks.items() if isinstance(look, Tensor)}
