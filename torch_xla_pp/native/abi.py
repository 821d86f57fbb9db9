"""The interface of Python and the compiled library: the mirror of `csrc/abi.h`.

Numbers are indices into these tuples. Fields are rows of int64 in this order; operands
of programs hold them as words of 32 bits.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Literal, get_args

from torch_xla_pp.schedule import KINDS

Op = Literal[
    "send",
    "receive",
    "begin",
    "end",
    "product",
    "product_sum",
    "product_bias",
    "sum",
    "softmax",
    "softmax_grad",
    "norm",
    "norm_grad",
    "norm_factor_grad",
    "gelu",
    "gelu_grad",
    "copy",
    "split",
    "attention",
    "attention_grad",
    "placed",
    "pause",
]
Direction = Literal["F", "B", "S"]
"""What a message carries: "F" values, "B" their gradients, "S" gradients to be summed
over copies of a parameter, in other stages or in other replicas."""


class Event(IntEnum):
    """An event in a program, as the recorder notes it."""

    BEGAN = 0
    ENDED = 1
    SENT = 2
    ASKED = 3
    ARRIVED = 4


class FailureKind(IntEnum):
    """The kind of failure of a generation."""

    NONE = 0
    ERROR = 1
    TIMEOUT = 2
    REPORT = 3


OPS: tuple[Op, ...] = get_args(Op)
WORDS = ("low", "high")
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
RECORD_FIELDS = (
    "event",
    "time_ns",
    "num_bytes",
    "direction",
    "stage",
    "origin",
    "microbatch",
)
MARK_FIELDS = ("kind", "stage", "microbatch")
ROUTE_FIELDS = (
    "engine",
    "generation",
    "peer",
    "direction",
    "stage",
    "origin",
    "microbatch",
    "digest",
    "num_devices",
    "num_sources",
    "num_levels",
)
ROW_FIELDS = ("tensor", "source", "tile", "offset", "run")
STATS_FIELDS = ("held_bytes", "num_messages", "num_waiting")
PRODUCT_FIELDS = (
    "batch",
    "rows",
    "depth",
    "columns",
    "is_left_turned",
    "is_right_turned",
)
SUM_FIELDS = ("rows", "columns", "is_of_columns")
SOFTMAX_FIELDS = ("rows", "columns", "is_safe", "is_log")
SOFTMAX_GRAD_FIELDS = ("rows", "columns", "is_log")
NORM_FIELDS = ("rows", "columns", "epsilon", "has_factor", "has_shift")
NORM_GRAD_FIELDS = ("rows", "columns", "has_factor", "has_added")
NORM_FACTOR_GRAD_FIELDS = ("rows", "columns")
GELU_FIELDS = ("count",)
COPY_FIELDS = (
    "offset",
    "factor",
    "size_0",
    "size_1",
    "size_2",
    "size_3",
    "stride_0",
    "stride_1",
    "stride_2",
    "stride_3",
)


def _layout(of: str) -> tuple[str, ...]:
    return tuple(f"{of}_{name}" for name in ("offset", "batch", "head", "row"))


ATTENTION_FIELDS = (
    *("batch", "heads", "rows", "keys", "width", "is_causal", "has_mask", "scale"),
    *(name for of in ("query", "key", "value", "mask") for name in _layout(of)),
)
ATTENTION_GRAD_FIELDS = (
    *ATTENTION_FIELDS,
    *_layout("grad"),
    *(
        name
        for of in ("query_grad", "key_grad", "value_grad")
        for name in (f"{of}_result", *_layout(of))
    ),
)

PLACE_FIELDS = ("value", "offset", "rank")

ABI = {
    "ops": OPS,
    "words": WORDS,
    "events": tuple(event.name.lower() for event in Event),
    "failures": tuple(kind.name.lower() for kind in FailureKind),
    "directions": DIRECTIONS,
    "kinds": KINDS,
    "record": RECORD_FIELDS,
    "mark": MARK_FIELDS,
    "route": ROUTE_FIELDS,
    "row": ROW_FIELDS,
    "stats": STATS_FIELDS,
    "product": PRODUCT_FIELDS,
    "sum": SUM_FIELDS,
    "softmax": SOFTMAX_FIELDS,
    "softmax_grad": SOFTMAX_GRAD_FIELDS,
    "norm": NORM_FIELDS,
    "norm_grad": NORM_GRAD_FIELDS,
    "norm_factor_grad": NORM_FACTOR_GRAD_FIELDS,
    "gelu": GELU_FIELDS,
    "copy": COPY_FIELDS,
    "attention": ATTENTION_FIELDS,
    "attention_grad": ATTENTION_GRAD_FIELDS,
    "place": PLACE_FIELDS,
}


def row_of(fields: Sequence[str], **values: int) -> list[int]:
    """Put values into the order of fields.

    Raises:
        TypeError: A field has no value, or a value no field.
    """
    if values.keys() != set(fields):
        raise TypeError(f"row: expected {', '.join(fields)}, got {', '.join(values)}.")
    return [values[field] for field in fields]


def words_of(row: Sequence[int]) -> list[int]:
    """Return a row of int64 as int32 words, as operands of programs hold it."""
    count = len(row)
    packed = struct.pack(f"<{count}q", *row)
    return list(struct.unpack(f"<{len(WORDS) * count}i", packed))


def faults_of(text: str) -> list[str]:
    """Return the differences between a library's description of itself and `ABI`."""
    theirs = {name: tuple(rest) for name, *rest in map(str.split, text.splitlines())}
    return [
        f"{name}: expected {' '.join(ABI.get(name, ('none',)))}, got "
        f"{' '.join(theirs.get(name, ('none',)))}"
        for name in dict.fromkeys([*ABI, *theirs])
        if ABI.get(name) != theirs.get(name)
    ]
