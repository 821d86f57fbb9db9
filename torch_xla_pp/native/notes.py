"""The times at which programs begin, end, send and receive, noted by themselves.

`begin_op` and `end_op` put notes into a graph that is being traced; the ops that send
and receive make notes of their own. Notes are kept only between `start` and `stop`,
which apply to the whole process. Times are those of `time.monotonic_ns`.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.native import loader
from torch_xla_pp.native.abi import (
    DIRECTIONS,
    MARK_FIELDS,
    RECORD_FIELDS,
    Event,
    Op,
    row_of,
    words_of,
)
from torch_xla_pp.schedule import KINDS, Kind

_TOKEN_SHAPE = (1,)


class Note(NamedTuple):
    """A note of an event in a program, and its time.

    Attributes:
        event: What happened.
        time_ns: When it happened.
        kind: Kind of an action, or direction of a message.
        stage: Stage of the action, or the one that receives the message.
        microbatch: Microbatch of either.
        origin: Stage that sends the message.
        num_bytes: Bytes that were sent.
    """

    event: Event
    time_ns: int
    kind: str
    stage: int
    microbatch: int
    origin: int = -1
    num_bytes: int = 0


@functools.cache
def mark(kind: Kind, stage: int, microbatch: int) -> Tensor:
    """Return the operand that names a program's action in its notes.

    It is kept until `stop`.
    """
    values = {"kind": KINDS.index(kind), "stage": stage, "microbatch": microbatch}
    fields = row_of(MARK_FIELDS, **values)
    return xla_compat.replicate(torch.tensor(words_of(fields), dtype=torch.int32))


def begin_op(mark: Tensor) -> Tensor:
    """Add a note of a program's begin to the graph.

    XLA may run it at any time, and mostly runs it first, as it has no dependencies.

    Returns:
        A token, which the program must use.
    """
    return _op("begin", mark, [])


def end_op(mark: Tensor, done: Sequence[tuple[Tensor, Any]]) -> Tensor:
    """Add a note of a program's end to the graph.

    Args:
        mark: The operand.
        done: Values that must be computed before, with their shardings.

    Returns:
        A token, which the program must return.
    """
    return _op("end", mark, done)


def _op(op: Op, mark: Tensor, done: Sequence[tuple[Tensor, Any]]) -> Tensor:
    # One target for all shapes: calls differ in operands, not in results.
    target = f"torch_xla_pp.{op}"
    loader.register_target(target, op)
    whole = xla_compat.replicated_sharding()
    operands = [xla_compat.to_shards(v, s) for v, s in [(mark, whole), *done]]
    (token,) = xla_compat.custom_call(target, operands, [_TOKEN_SHAPE], [torch.int32])
    return xla_compat.from_shards(token, whole, _TOKEN_SHAPE, torch.int32)


def start() -> None:
    """Start keeping notes."""
    loader.library().xpp_start_recording()


def stop() -> list[Note]:
    """Stop keeping notes, and return those that were kept.

    Wait for the programs whose notes are wanted before, see `xla_compat.flush`.
    """
    mark.cache_clear()
    size = len(RECORD_FIELDS)
    call = loader.library().xpp_stop_recording
    count, capacity, out = call(None, 0), 0, None
    while count > capacity:
        capacity = count
        out = (ctypes.c_int64 * (capacity * size))()
        count = call(out, capacity)
    numbers = [] if out is None else out[: count * size]
    rows = (numbers[i : i + size] for i in range(0, len(numbers), size))
    return [_note(dict(zip(RECORD_FIELDS, row, strict=True))) for row in rows]


def _note(fields: dict[str, int]) -> Note:
    number, event = fields.pop("direction"), Event(fields.pop("event"))
    is_action = event in (Event.BEGAN, Event.ENDED)
    kind = (KINDS if is_action else DIRECTIONS)[number]
    return Note(event=event, kind=kind, **fields)
