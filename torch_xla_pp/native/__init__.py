"""The compiled library (`csrc/`), as Python sees it."""

from torch_xla_pp.native import notes
from torch_xla_pp.native.abi import (
    DIRECTIONS,
    OPS,
    ROUTE_FIELDS,
    ROW_FIELDS,
    Direction,
    Event,
    Op,
    row_of,
    words_of,
)
from torch_xla_pp.native.elf import base_address
from torch_xla_pp.native.engine import Engine, Failure, Stats
from torch_xla_pp.native.loader import (
    Unavailable,
    library,
    library_path,
    register_target,
)
from torch_xla_pp.native.notes import Note

__all__ = [
    "DIRECTIONS",
    "Direction",
    "Engine",
    "Event",
    "Failure",
    "Note",
    "OPS",
    "Op",
    "ROUTE_FIELDS",
    "ROW_FIELDS",
    "Stats",
    "Unavailable",
    "base_address",
    "library",
    "library_path",
    "notes",
    "register_target",
    "row_of",
    "words_of",
]
