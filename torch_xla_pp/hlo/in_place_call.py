"""Write a call whose result takes the memory of an operand.

Numbers of fields are those of xla/service/hlo.proto and xla/xla_data.proto of OpenXLA.
"""

from collections.abc import Sequence

from torch_xla_pp.protobuf import WireValue, one_field

_Field = tuple[int, WireValue]

# HloModuleProto, and HloComputationProto.
_NAME, _ENTRY_NAME, _COMPUTATIONS, _SIGNATURE, _ENTRY = 1, 2, 3, 4, 6
_INSTRUCTIONS, _ID, _ROOT = 2, 5, 6
# HloInstructionProto.
_OPCODE, _SHAPE, _PARAMETER_NUMBER, _TARGET, _OWN_ID, _OPERANDS = 2, 3, 9, 28, 35, 36
_CONFIG, _ALIASES, _API = 43, 74, 77
# OutputOperandAliasing.
_ALIASED_OPERAND = 2
# ProgramShapeProto.
_PARAMETERS, _RESULT, _PARAMETER_NAMES = 1, 2, 3
# ShapeProto, and LayoutProto.
_ELEMENT_TYPE, _DIMENSIONS, _LAYOUT, _ORDER = 2, 3, 5, 1
_FLOAT32, _TYPED_FFI = 11, 4


def in_place_call(target: str, sizes: Sequence[int], config: str) -> bytes:
    """Return an `HloModuleProto` that calls a handler of XLA's typed FFI.

    The result has the size of the last operand and takes its memory, which XLA copies
    before if another operation reads it later.

    Args:
        target: The name that the handler is registered for.
        sizes: How many numbers of float32 each operand has; all are flat.
        config: The handler's attributes, as MLIR writes a dictionary.
    """
    shapes = [*map(_shape, sizes)]
    places, last = range(len(sizes)), len(sizes) - 1
    # XLA keeps what is before the dot of a name.
    names = [f"operand.{place}".encode() for place in places]
    name = b"in_place.0"
    signature = _message(
        *((_PARAMETERS, shape) for shape in shapes),
        (_RESULT, shapes[last]),
        *((_PARAMETER_NAMES, operand) for operand in names),
    )
    # Instructions and computations are numbered together.
    root, entry = len(sizes), len(sizes) + 1
    parameters = [
        _instruction(names[i], b"parameter", shapes[i], i, (_PARAMETER_NUMBER, i))
        for i in places
    ]
    call = _instruction(
        b"call.0",
        b"custom-call",
        shapes[last],
        root,
        (_TARGET, target.encode()),
        *((_OPERANDS, place) for place in places),
        (_CONFIG, config.encode()),
        (_ALIASES, one_field(_ALIASED_OPERAND, last)),
        (_API, _TYPED_FFI),
    )
    computation = _message(
        (_NAME, name),
        *((_INSTRUCTIONS, one) for one in (*parameters, call)),
        (_SIGNATURE, signature),
        (_ID, entry),
        (_ROOT, root),
    )
    return _message(
        (_NAME, name),
        (_ENTRY_NAME, name),
        (_COMPUTATIONS, computation),
        (_SIGNATURE, signature),
        (_ENTRY, entry),
    )


def _shape(size: int) -> bytes:
    return _message(
        (_ELEMENT_TYPE, _FLOAT32),
        (_DIMENSIONS, size),
        (_LAYOUT, one_field(_ORDER, 0)),
    )


def _instruction(
    name: bytes, opcode: bytes, shape: bytes, number: int, *others: _Field
) -> bytes:
    fields = ((_NAME, name), (_OPCODE, opcode), (_SHAPE, shape), (_OWN_ID, number))
    return _message(*fields, *others)


def _message(*fields: _Field) -> bytes:
    return b"".join(one_field(number, value) for number, value in fields)
