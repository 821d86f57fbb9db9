"""Texts by which ranks compare the values that they hold."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.text import type_text


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return name → a text that is equal for equal values that are sharded alike."""
    shards = xla_compat.read_shards(list(tensors.values()))
    texts = xla_compat.sharding_texts(list(tensors.values()))
    return {
        name: fingerprint(value, parts, sharding)
        for (name, value), parts, sharding in zip(
            tensors.items(), shards, texts, strict=True
        )
    }


def fingerprint(value: Tensor, parts: Iterable[Tensor], sharding: str = "") -> str:
    """Return a text for a value.

    Args:
        value: Only its metadata counts.
        parts: Its data, on the host.
        sharding: Its sharding, if that is to be compared, too.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.detach().contiguous().reshape(-1).view(torch.uint8)
        digest.update(data.numpy().tobytes())
    layout = "" if sharding in ("", "{replicated}") else f" as {sharding}"
    kind = type_text(value.shape, value.dtype)
    frozen = "" if value.requires_grad else " frozen"
    return f"{kind}{layout}{frozen} with values {digest.hexdigest()}"
