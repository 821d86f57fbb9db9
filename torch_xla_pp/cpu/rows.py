"""Sums and softmax along the rows of matrices, in programs for one CPU device.

XLA cuts a long sum into loops over 32 elements (its `tree_reduction_rewriter`), each of
which is compiled on its own and cannot be joined with what is around; a softmax becomes
nine loops. A loop takes XLA some 10 ms to compile, whatever it does, so half of the
time that it took to compile a stage went into these. Here they are calls of `csrc/`,
which are as accurate: what is added up one after another is short.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torch_xla_pp import env, native, xla_compat
from torch_xla_pp.cpu.handlers import find_handlers

_OPS = "torch_xla_pp."


@functools.cache
def has_rows() -> bool:
    """Return whether programs call these ops; kept from the first call on.

    They do on one CPU device: XLA cannot split a call over several.
    """
    is_one = env.device_kind() == "CPU" and xla_compat.num_local_devices() == 1
    return is_one and find_handlers() is not None


def total(value: Tensor, count: int, *, is_of_columns: bool) -> Tensor:
    """Add up a float32 value along its first or its last dimensions.

    Args:
        value: The value, not empty.
        count: Of how many elements each sum is.
        is_of_columns: Whether they are those of the first dimensions.

    Returns:
        The sums, of one dimension.
    """
    others = value.numel() // count
    rows, columns = (count, others) if is_of_columns else (others, count)
    fields = {"rows": rows, "columns": columns, "is_of_columns": int(is_of_columns)}
    return _call("sum", [value], [others], fields)


def softmax(value: Tensor, *, is_safe: bool) -> Tensor:
    """Return the softmax of a float32 value along its last dimension.

    Args:
        value: The value, not empty.
        is_safe: Whether a row of minus infinity alone gives zeros; else it gives NaN.
    """
    fields = {**_rows_of(value), "is_safe": int(is_safe)}
    return _call("softmax", [value], value.shape, fields)


def softmax_grad(grad: Tensor, output: Tensor) -> Tensor:
    """Return the gradient of the input of a softmax, from that of its output."""
    return _call("softmax_grad", [grad, output], grad.shape, _rows_of(grad))


def _rows_of(value: Tensor) -> dict[str, int]:
    return {"rows": math.prod(value.shape[:-1]), "columns": value.shape[-1]}


def _call(
    op: "native.Op",
    values: Sequence[Tensor],
    shape: Sequence[int],
    fields: Mapping[str, int],
) -> Tensor:
    numbers = map(str, [*fields.values(), *shape])
    target = ".".join([_OPS + op, *numbers])
    native.register_target(target, op)
    whole = xla_compat.replicated_sharding()
    parts = [xla_compat.to_shards(value, whole) for value in values]
    (result,) = xla_compat.custom_call(
        target, parts, [list(shape)], [torch.float32], fields
    )
    return xla_compat.from_shards(result, whole, list(shape), torch.float32)
