"""Bytes that values take on one device."""

import math
from collections.abc import Mapping

from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.hlo import parse_sharding


class Sizes:
    """The bytes that values take on one device, by name.

    Looking at a value takes microseconds, so each name is looked at once: the values of
    one set of programs always look alike.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def total(self, values: Mapping[str, Tensor]) -> int:
        """Return the bytes of all `values`."""
        new = [name for name in values if name not in self._bytes]
        if new:
            found = device_bytes([values[name] for name in new])
            self._bytes.update(zip(new, found, strict=True))
        return sum(map(self._bytes.__getitem__, values))


def device_bytes(tensors: list[Tensor]) -> list[int]:
    """Return how many bytes of each tensor lie on one device."""
    found = []
    for tensor, text in zip(tensors, xla_compat.sharding_texts(tensors), strict=True):
        shape = parse_sharding(text).shard_shape(tensor.shape) if text else tensor.shape
        found.append(math.prod(shape) * tensor.element_size())
    return found
