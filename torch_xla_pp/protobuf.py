"""Read and write messages in protobuf's wire format, as far as HLO and PJRT need it.

A message is a row of fields, each of a number and a value: an integer, or bytes, which
are a text, another message or packed integers; only the message's definition shows
which.

Source: https://protobuf.dev/programming-guides/encoding/.
"""

from collections.abc import Iterator, Sequence

WireValue = int | bytes

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_WIDTHS = {_FIXED_64: 8, _FIXED_32: 4}
_MORE = 0x80


def varint(number: int) -> bytes:
    """Return an integer as it is written; a negative one is one of 64 bits."""
    number %= 1 << 64
    found = bytearray()
    while number >= _MORE:
        found.append(number % _MORE | _MORE)
        number //= _MORE
    return bytes([*found, number])


def one_field(number: int, value: WireValue) -> bytes:
    """Return a field of a message."""
    if isinstance(value, int):
        return varint(number << 3 | _VARINT) + varint(value)
    return varint(number << 3 | _BYTES) + varint(len(value)) + value


def written_message(*fields: tuple[int, WireValue]) -> bytes:
    """Return a message of fields, each a number and its value."""
    return b"".join(one_field(number, value) for number, value in fields)


def packed(numbers: Sequence[int]) -> bytes:
    """Return integers in a row, the value of a field of its own."""
    return b"".join(map(varint, numbers))


def fields_of(message: bytes) -> Iterator[tuple[int, WireValue]]:
    """Yield number and value of each field, in the order in which they are written.

    Raises:
        ValueError: It is no message.
    """
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(message, at)
        elif kind in _WIDTHS:
            size = _WIDTHS[kind]
        else:
            raise ValueError(
                f"protobuf: expected kinds of fields 0, 1, 2, 5, got {kind}"
            )
        if at + size > len(message):
            raise ValueError("protobuf: expected a whole message, got one cut short")
        yield number, message[at : at + size]
        at += size


def messages(message: bytes, number: int) -> list[bytes]:
    """Return all values that are bytes, of one field."""
    return [v for n, v in fields_of(message) if n == number and isinstance(v, bytes)]


def integer_of(message: bytes, number: int) -> int:
    """Return a field that is an integer, 0 if it is not there."""
    found = [v for n, v in fields_of(message) if n == number and isinstance(v, int)]
    return found[-1] if found else 0


def integers_of(message: bytes, number: int) -> tuple[int, ...]:
    """Return the integers of a repeated field."""
    return integers([v for n, v in fields_of(message) if n == number])


def integers(values: Sequence[WireValue]) -> tuple[int, ...]:
    """Return the integers of a repeated field, packed or not."""
    found: list[int] = []
    for value in values:
        found += [value] if isinstance(value, int) else _unpacked(value)
    return tuple(found)


def _unpacked(row: bytes) -> list[int]:
    found, at = [], 0
    while at < len(row):
        number, at = _read_varint(row, at)
        found.append(number)
    return found


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(message):
        byte = message[at]
        at += 1
        number |= byte % _MORE << shift
        if byte < _MORE:
            return number, at
        shift += 7
    raise ValueError("protobuf: expected a whole integer, got one cut short")
