"""Small HLO programs, written by hand."""

from torch_xla_pp.protobuf import one_field, packed

F32 = 11
SHARDED = (
    one_field(1, 3) + one_field(3, packed([4, 1])) + one_field(4, packed(range(4)))
)
REPLICATED = one_field(1, 0)


def shape(*sizes: int, element_type: int = F32) -> bytes:
    """Return a `ShapeProto` with its layout in the order of rows."""
    order = one_field(1, packed(range(len(sizes) - 1, -1, -1)))
    return (
        one_field(2, element_type) + one_field(3, packed(sizes)) + one_field(5, order)
    )


def tuple_shape(*shapes: bytes) -> bytes:
    return one_field(2, 13) + b"".join(one_field(4, part) for part in shapes)


def instruction(name: str, opcode: str, number: int, *fields: bytes) -> bytes:
    head = one_field(1, name.encode()) + one_field(2, opcode.encode())
    return head + one_field(35, number) + b"".join(fields)


def computation(number: int, root: int, *instructions: bytes) -> bytes:
    rows = b"".join(one_field(2, one) for one in instructions)
    name = one_field(1, b"c%d" % number)
    return name + rows + one_field(5, number) + one_field(6, root)


def module(*computations: bytes, entry: int = 1, more: bytes = b"") -> bytes:
    rows = b"".join(one_field(3, one) for one in computations)
    names = one_field(1, b"m") + one_field(2, b"c%d" % entry)
    return names + rows + one_field(5, 1) + one_field(6, entry) + more


def square(rows: int = 64) -> bytes:
    """Return a program that squares a value with rows on four devices, for all."""
    value = shape(rows, 128)
    signature = one_field(1, value) + one_field(2, value) + one_field(3, b"p")
    one = computation(
        1,
        3,
        instruction("p", "parameter", 1, one_field(3, value), one_field(40, SHARDED)),
        instruction(
            "r",
            "multiply",
            2,
            one_field(3, value),
            one_field(36, packed([1, 1])),
        ),
        instruction(
            "s",
            "custom-call",
            3,
            one_field(3, value),
            one_field(28, b"Sharding"),
            one_field(36, packed([2])),
            one_field(40, REPLICATED),
        ),
    )
    one += one_field(4, signature)
    return module(one, more=one_field(4, signature))
