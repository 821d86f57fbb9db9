"""Bytes that values take on one device."""

import functools
import math
from typing import NamedTuple

from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.hlo import parse_sharding


class Size(NamedTuple):
    """The size of values on one device.

    Attributes:
        num_bytes: All of them.
        small_bytes: Those that are small.
    """

    num_bytes: int
    small_bytes: int


def device_bytes(tensors: list[Tensor]) -> list[int]:
    """Return how many bytes each tensor takes on one device."""
    texts = xla_compat.sharding_texts(tensors)
    return [
        _shard_size(text, tensor.shape) * tensor.element_size()
        for tensor, text in zip(tensors, texts, strict=True)
    ]


@functools.lru_cache(maxsize=4096)
def _shard_size(text: str, shape: tuple[int, ...]) -> int:
    """Return the elements of one device's part of a value with this sharding."""
    return math.prod(parse_sharding(text).shard_shape(shape) if text else shape)
