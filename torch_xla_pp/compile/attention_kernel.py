"""The rule by which programs for TPUs compute `attention` with torch_xla's kernel.

The kernel is written for one device, so each device calls it for its part of batch and
heads. It is Mosaic code, which JAX writes while the stage is traced; nothing of JAX
runs afterwards. Where JAX is missing, or the kernel does not support the shapes, a
joint graph has the plain operations.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torch_xla_pp import env, xla_compat
from torch_xla_pp.graph import (
    ATTENTION,
    ATTENTION_BACKWARD,
    attention_axes,
)
from torch_xla_pp.mesh import LogicalAxes, Partition

# Rows of a tile of the kernel, and its largest blocks of queries or keys; those of keys
# are cut again for the gradient of queries.
_TILE, _SHORT_BLOCK, _BLOCK, _LONG_BLOCK = 128, 256, 512, 1024
_DTYPES = (torch.bfloat16, torch.float32)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernel:
    """The rule by which operations of `attention` run.

    Args:
        partition: Takes logical axes; returns the mesh axes that split each dimension.
        sharding: Returns torch_xla's sharding for these.
    """

    partition: Callable[[LogicalAxes], Partition]
    sharding: Callable[[Partition], xla_compat.OpSharding]

    def __call__(
        self, node: fx.Node, values: Mapping[fx.Node, Any], notes: dict[fx.Node, Any], /
    ) -> tuple[Tensor, ...] | None:
        """Run a forward or a backward; None for all else."""
        if node.target not in (ATTENTION, ATTENTION_BACKWARD):
            return None
        given: Any = node.args
        *tensors, is_causal, scale, names = given
        operands = [values[tensor] for tensor in tensors if tensor is not None]
        if node.target is ATTENTION_BACKWARD:
            operands[0], operands[4] = (operands[i].transpose(1, 2) for i in (0, 4))
        split = self.partition(attention_axes(names))
        whole = self.sharding(split)
        rows = self.sharding(split[:3])
        shards = [
            xla_compat.manual(xla_compat.to_shards(x, rows if x.dim() == 3 else whole))
            for x in operands
        ]
        is_forward = node.target is ATTENTION
        found = xla_compat.flash_attention(shards, is_causal, scale, is_forward)
        looks = node.meta["val"]
        if is_forward:
            looks = [looks[0].transpose(1, 2), *looks[1:]]
        results = [
            xla_compat.from_shards(
                xla_compat.manual(part),
                rows if look.dim() == 3 else whole,
                tuple(look.shape),
                look.dtype,
            )
            for part, look in zip(found, looks, strict=True)
        ]
        if is_forward:
            results[0] = results[0].transpose(1, 2)
        return tuple(results)

    def takes(self, *args: Any) -> bool:
        """Return whether the kernel computes this attention, or gradient.

        It must know the axes of all dimensions, and has no mask.

        Args:
            args: Those of the operation.
        """
        *tensors, _, _, names = args
        *_, query, key, _, mask = tensors[:5]
        is_taken = (
            bool(names)
            and mask is None
            and query.dtype in _DTYPES
            and takes_shapes(query.shape, key.shape)
            and not any(self.partition(attention_axes(names))[2:])
        )
        if not is_taken:
            _logger.info("attention of %s is computed plainly", list(query.shape))
        return is_taken


def takes_shapes(query: tuple[int, ...], key: tuple[int, ...]) -> bool:
    """Return whether the kernel supports these queries and keys, forward and backward.

    Lengths are cut into equal blocks of whole tiles; the width of a head is less than a
    tile, or a multiple of it.
    """
    width = query[-1]
    return (
        _is_cut(query[-2], _LONG_BLOCK)
        and _is_cut(query[-2], _BLOCK)
        and _is_cut(key[-2], _BLOCK)
        and _is_cut(min(key[-2], _BLOCK), _SHORT_BLOCK)
        and (width < _TILE or width % _TILE == 0)
    )


def _is_cut(length: int, block: int) -> bool:
    return length % _TILE == 0 and length % min(length, block) == 0


@functools.cache
def has_kernel_compiler() -> bool:
    """Return whether JAX, which writes the kernel, is there; warn once if it is not."""
    found = importlib.util.find_spec("jax") is not None
    if not found:
        _logger.warning(
            "attention is computed plainly: expected JAX, which writes its kernel for "
            "TPUs, got none. Install torch_xla[pallas]."
        )
    return found


def calls_kernel() -> bool:
    """Return whether programs that are written now are to call the kernel."""
    return env.device_kind() == "TPU" and has_kernel_compiler()
