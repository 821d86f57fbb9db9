"""Write a call of a handler, with all that XLA knows of one.

Numbers of fields are those of xla/service/hlo.proto and xla/xla_data.proto of OpenXLA.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch_xla_pp.protobuf import WireValue, one_field, packed, written_message

_Field = tuple[int, WireValue]

# HloModuleProto, and HloComputationProto.
_NAME, _ENTRY_NAME, _COMPUTATIONS, _SIGNATURE, _ENTRY = 1, 2, 3, 4, 6
_INSTRUCTIONS, _ID, _ROOT = 2, 5, 6
# HloInstructionProto.
_OPCODE, _SHAPE, _PARAMETER_NUMBER, _TARGET, _OWN_ID, _OPERANDS = 2, 3, 9, 28, 35, 36
_SHARDING, _CONFIG, _IS_LAID_OUT, _LAYOUTS, _ALIASES, _API = 40, 43, 56, 57, 74, 77
# OutputOperandAliasing.
_ALIASED_RESULT, _ALIASED_OPERAND = 1, 2
# ProgramShapeProto.
_PARAMETERS, _RESULT, _PARAMETER_NAMES = 1, 2, 3
# ShapeProto, and LayoutProto.
_ELEMENT_TYPE, _DIMENSIONS, _TUPLE_SHAPES, _LAYOUT, _ORDER = 2, 3, 4, 5, 1
_TYPES = {"bool": 1, "float32": 11}
_TUPLE, _TYPED_FFI = 13, 4
# OpSharding, and its types.
_TYPE, _TUPLE_SHARDINGS = 1, 5
_TUPLE_TYPE, _MANUAL_TYPE = 2, 4


class CallShape(NamedTuple):
    """The shape of an operand or a result of a call.

    Attributes:
        dtype: "float32" or "bool".
        sizes: Its dimensions.
    """

    dtype: str
    sizes: tuple[int, ...]


def written_call(
    target: str,
    operands: Sequence[CallShape],
    results: Sequence[CallShape],
    config: str,
    *,
    is_in_place: bool = False,
    is_manual: bool = False,
) -> bytes:
    """Return an `HloModuleProto` that calls a handler of XLA's typed FFI.

    Operands and results are in the order of rows.

    Args:
        target: The name that the handler is registered for.
        operands: What it takes.
        results: What it returns.
        config: The handler's attributes, as MLIR writes a dictionary.
        is_in_place: Whether the only result takes the memory of the last operand, which
            XLA copies before if another operation reads it later.
        is_manual: Whether the call is part of a graph that is written for one device.
    """
    shapes = [*map(shape_message, operands)]
    result = tuple_message([*map(shape_message, results)])
    places = range(len(operands))
    # XLA keeps what is before the dot of a name.
    names = [f"operand.{place}".encode() for place in places]
    name = b"handler.0"
    signature = written_message(
        *((_PARAMETERS, shape) for shape in shapes),
        (_RESULT, result),
        *((_PARAMETER_NAMES, operand) for operand in names),
    )
    # Instructions and computations are numbered together.
    root, entry = len(operands), len(operands) + 1
    one = [(_SHARDING, _MANUAL)] if is_manual else []
    alike = [(_SHARDING, _manual(len(results)))] if is_manual else []
    parameters = [
        _instruction(names[i], b"parameter", shapes[i], i, (_PARAMETER_NUMBER, i), *one)
        for i in places
    ]
    aliased = [(_ALIASES, aliasing_message([], root - 1))] if is_in_place else []
    call = _instruction(
        b"call.0",
        b"custom-call",
        result,
        root,
        (_TARGET, target.encode()),
        *((_OPERANDS, place) for place in places),
        (_CONFIG, config.encode()),
        (_IS_LAID_OUT, 1),
        *((_LAYOUTS, shape) for shape in shapes),
        *aliased,
        *alike,
        (_API, _TYPED_FFI),
    )
    computation = written_message(
        (_NAME, name),
        *((_INSTRUCTIONS, one) for one in (*parameters, call)),
        (_SIGNATURE, signature),
        (_ID, entry),
        (_ROOT, root),
    )
    return written_message(
        (_NAME, name),
        (_ENTRY_NAME, name),
        (_COMPUTATIONS, computation),
        (_SIGNATURE, signature),
        (_ENTRY, entry),
    )


def shape_message(shape: CallShape) -> bytes:
    """Return a `ShapeProto` of a value in the order of rows."""
    order = packed([*reversed(range(len(shape.sizes)))])
    return written_message(
        (_ELEMENT_TYPE, _TYPES[shape.dtype]),
        (_DIMENSIONS, packed(shape.sizes)),
        (_LAYOUT, one_field(_ORDER, order)),
    )


def tuple_message(shapes: Sequence[bytes]) -> bytes:
    """Return the `ShapeProto` of several results; of one it is its own."""
    if len(shapes) == 1:
        return shapes[0]
    parts = ((_TUPLE_SHAPES, shape) for shape in shapes)
    return written_message((_ELEMENT_TYPE, _TUPLE), *parts)


def aliasing_message(result: Sequence[int], operand: int) -> bytes:
    """Return an `OutputOperandAliasing`: a result takes the memory of an operand.

    Args:
        result: Which one of a tuple, empty for the only one.
        operand: The operand.
    """
    index = [(_ALIASED_RESULT, packed(result))] if result else []
    return written_message(*index, (_ALIASED_OPERAND, operand))


def _manual(count: int) -> bytes:
    """Return the sharding of so many results of a manual region."""
    if count == 1:
        return _MANUAL
    return written_message((_TYPE, _TUPLE_TYPE), *[(_TUPLE_SHARDINGS, _MANUAL)] * count)


def _instruction(
    name: bytes, opcode: bytes, shape: bytes, number: int, *others: _Field
) -> bytes:
    fields = ((_NAME, name), (_OPCODE, opcode), (_SHAPE, shape), (_OWN_ID, number))
    return written_message(*fields, *others)


_MANUAL = written_message((_TYPE, _MANUAL_TYPE))
