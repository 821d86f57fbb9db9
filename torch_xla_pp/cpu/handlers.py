"""The compiled library's ops for programs of CPU devices."""

import contextlib
import ctypes
import functools
import logging
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from torch_xla_pp import env, native, xla_compat
from torch_xla_pp.hlo import CallShape, Handlers, Placed, place_calls, written_call

_OPS = "torch_xla_pp."
# What tells calls on parts apart, None where values are whole.
_whole: ContextVar[str | None] = ContextVar("whole", default=None)
_logger = logging.getLogger(__name__)


@functools.cache
def find_handlers() -> ctypes.CDLL | None:
    """Return the library, which knows how many cores a device has; None without one.

    Called when the rank's devices are known.
    """
    try:
        found = native.library()
    except native.Unavailable as reason:
        _logger.info("XLA computes products and sums itself: %s", reason)
        return None
    # As many devices compute at the same time.
    cores = len(os.sched_getaffinity(0)) // xla_compat.num_local_devices()
    found.xpp_use_cores(max(1, cores))
    return found


@functools.cache
def has_own_ops() -> bool:
    """Return whether programs call these ops on whole values; kept from the first call.

    They do on one CPU device: XLA cannot split a call over several.
    """
    is_one = env.device_kind() == "CPU" and xla_compat.num_local_devices() == 1
    return is_one and find_handlers() is not None


@functools.cache
def has_ops_of_parts() -> bool:
    """Return whether programs call these ops on each device's parts, on several."""
    is_one = env.device_kind() != "CPU" or xla_compat.num_local_devices() == 1
    return not is_one and find_handlers() is not None


@contextlib.contextmanager
def calling_on_parts(whole: str) -> Iterator[None]:
    """Let `call_handler` take one device's parts of values, within `to_shards`.

    Args:
        whole: What tells calls apart whose whole results differ, but not the parts.
    """
    token = _whole.set(whole)
    try:
        yield
    finally:
        _whole.reset(token)


def fits_own_ops(value: object) -> bool:
    """Return whether a value may be an operand of these ops: float32, and not empty."""
    if not isinstance(value, Tensor):
        return False
    return value.dtype == torch.float32 and value.numel() > 0


def call_handler(
    op: "native.Op",
    values: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    fields: Mapping[str, int],
    *,
    is_in_place: bool = False,
) -> list[Tensor]:
    """Call one of the library's ops in a program for one device, or on its parts.

    Args:
        op: Which one; its operands are float32 or bool, its results float32.
        values: The operands.
        shapes: Those of the results.
        fields: Its attributes, which say the sizes of all operands.
        is_in_place: Whether the only result takes the memory of the last operand.
    """
    whole = _whole.get()
    others = [] if whole is None else [whole]
    module = written_call(
        _registered(op, [*fields.values(), *others]),
        [_call_shape(value.shape, value.dtype) for value in values],
        [_call_shape(shape, torch.float32) for shape in shapes],
        xla_compat.attributes_text(fields),
        is_in_place=is_in_place,
        is_manual=whole is not None,
    )
    results = xla_compat.call_module(module, values)
    return results if whole is None else [*map(xla_compat.manual, results)]


def placed_calls(
    module: bytes,
    written: Sequence[Sequence[int]],
    read: Iterable[int],
    updated: Mapping[int, Mapping[int, int]],
) -> Placed | None:
    """Let calls of these ops write and read pieces of larger values.

    Args:
        module: The `HloModuleProto` of a program for one device.
        written: As for `hlo.place_calls`.
        read: See there.
        updated: See there.

    Returns:
        What it becomes, None if it stays as it is.
    """
    return place_calls(module, _handlers(), written, read, updated)


@functools.cache
def _handlers() -> Handlers:
    ops: dict[str, int] = {op: number for number, op in enumerate(native.OPS)}
    placed = _registered("placed", ())
    return Handlers(
        prefix=_OPS,
        ops=ops,
        placed=placed,
        copying=ops["split"],
        waiting=f"{_OPS}end",
    )


def _call_shape(shape: Sequence[int], dtype: torch.dtype) -> CallShape:
    return CallShape(str(dtype).removeprefix("torch."), tuple(shape))


def _registered(op: "native.Op", numbers: Iterable[int | str]) -> str:
    """Return a name for calls of an op with these numbers, which is registered."""
    target = ".".join([_OPS + op, *map(str, numbers)])
    native.register_target(target, op)
    return target


def bits_of(number: float) -> int:
    """Return the bits of a number as float32, as attributes are whole numbers."""
    bits: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return bits
