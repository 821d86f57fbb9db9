"""Bytes that values take on one device."""

import math

from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.hlo import parse_sharding


def device_bytes(tensors: list[Tensor]) -> list[int]:
    """Return how many bytes each tensor takes on one device."""
    found = []
    for tensor, text in zip(tensors, xla_compat.sharding_texts(tensors), strict=True):
        shape = parse_sharding(text).shard_shape(tensor.shape) if text else tensor.shape
        found.append(math.prod(shape) * tensor.element_size())
    return found
