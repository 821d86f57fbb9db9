"""Bytes that values take on one device."""

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.hlo import parse_sharding


class ValueSizes:
    """The bytes of values on one device by their names.

    Reading a value's size takes microseconds, so each name is read once: values of one
    set of programs always have the same size. Names that come together once do so
    again, so their sums are kept, too.

    Args:
        known: Bytes by name.
    """

    def __init__(self, known: Mapping[str, int] | None = None) -> None:
        self._bytes = dict(known or {})
        self._sums: dict[tuple[frozenset[str], int | None], int] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Read the sizes of values whose names are new."""
        new = [name for name in values if name not in self._bytes]
        if new:
            found = device_bytes([values[name] for name in new])
            self._bytes.update(zip(new, found, strict=True))

    def of(self, values: Mapping[str, Tensor]) -> int:
        """Return the bytes of values together."""
        self.add(values)
        return self.total(values)

    def total(self, names: Iterable[str], most: int | None = None) -> int:
        """Return the bytes of values of these names together.

        Args:
            names: Their names, all of them known.
            most: The size of the largest that count, None for any size.
        """
        key = frozenset(names), most
        if key not in self._sums:
            found = [self._bytes[name] for name in key[0]]
            counted = [x for x in found if most is None or x <= most]
            self._sums[key] = sum(counted)
        return self._sums[key]


def device_bytes(tensors: list[Tensor]) -> list[int]:
    """Return how many bytes each tensor takes on one device."""
    found = []
    for tensor, text in zip(tensors, xla_compat.sharding_texts(tensors), strict=True):
        shape = parse_sharding(text).shard_shape(tensor.shape) if text else tensor.shape
        found.append(math.prod(shape) * tensor.element_size())
    return found
