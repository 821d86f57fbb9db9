"""Messages in protobuf's wire format are read as they were written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_xla_pp.protobuf import (
    fields_of,
    integers,
    messages,
    one_field,
    packed,
    varint,
)

pytestmark = pytest.mark.pure

NUMBERS = st.integers(0, 2**64 - 1)
ROWS = st.lists(st.tuples(st.integers(1, 2**20), st.one_of(NUMBERS, st.binary())))


@given(ROWS)
def test_what_is_written_is_read(rows: list[tuple[int, int | bytes]]) -> None:
    written = b"".join(one_field(number, value) for number, value in rows)
    assert [*fields_of(written)] == rows


@given(st.lists(NUMBERS))
def test_integers_are_read_packed_or_not(numbers: list[int]) -> None:
    assert integers([packed(numbers)]) == tuple(numbers)
    assert integers(numbers) == tuple(numbers)


def test_the_documented_examples_are_written_so() -> None:
    assert varint(150) == bytes.fromhex("9601")
    assert one_field(1, 150) == bytes.fromhex("089601")
    assert one_field(2, b"testing") == bytes.fromhex("120774657374696e67")
    assert varint(-2) == bytes.fromhex("feffffffffffffffff01")


def test_fields_of_fixed_width_are_skipped_over() -> None:
    message = b"\x0d\x00\x00\x80\x3f" + b"\x11" + bytes(8) + one_field(3, b"x")
    assert messages(message, 3) == [b"x"]


@pytest.mark.parametrize("message", [b"\x0a\x05ab", b"\x08\x80", b"\x0b", b"\x09abc"])
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="protobuf: expected"):
        list(fields_of(message))
