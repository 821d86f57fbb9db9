"""Python and the compiled library agree on every number and field."""

import ctypes
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrun import ROOT

from torch_xla_pp.native import abi, loader

pytestmark = pytest.mark.pure

_LISTS = {
    "XPP_OPS": "ops",
    "XPP_WORDS": "words",
    "XPP_EVENTS": "events",
    "XPP_FAILURES": "failures",
    "XPP_DIRECTIONS": "directions",
    "XPP_KINDS": "kinds",
    "XPP_RECORD_FIELDS": "record",
    "XPP_MARK_FIELDS": "mark",
    "XPP_ROUTE_FIELDS": "route",
    "XPP_ROW_FIELDS": "row",
    "XPP_STATS_FIELDS": "stats",
    "XPP_PRODUCT_FIELDS": "product",
    "XPP_SUM_FIELDS": "sum",
    "XPP_SOFTMAX_FIELDS": "softmax",
    "XPP_SOFTMAX_GRAD_FIELDS": "softmax_grad",
    "XPP_NORM_FIELDS": "norm",
    "XPP_NORM_GRAD_FIELDS": "norm_grad",
    "XPP_NORM_FACTOR_GRAD_FIELDS": "norm_factor_grad",
    "XPP_GELU_FIELDS": "gelu",
    "XPP_COPY_FIELDS": "copy",
    "XPP_ATTENTION_FIELDS": "attention",
    "XPP_ATTENTION_GRAD_FIELDS": "attention_grad",
    "XPP_PLACE_FIELDS": "place",
}


def lists_in_csrc() -> dict[str, tuple[str, ...]]:
    """Read the lists of abi.h: of each entry, the name that it has in Python."""
    source = (ROOT / "csrc" / "abi.h").read_text()
    source = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)
    layout = r"X(\1_offset) X(\1_batch) X(\1_head) X(\1_row)"
    source = re.sub(r"XPP_LAYOUT_FIELDS\(X, (?!of\b)(\w+)\)", layout, source)
    lists = dict(re.findall(r"#define (\w+)\(X\)((?:.*\\\n)*.*)", source))
    for name, entries in lists.items():
        # A list may begin with another one.
        inner = r"\b(XPP_\w+)\(X\)"
        lists[name] = re.sub(inner, lambda found: lists[found[1]], entries)
    return {
        _LISTS[name]: tuple(re.findall(r"X\((?:\w+, )?(\w+)\)", entries))
        for name, entries in lists.items()
    }


def text_of(lists: dict[str, tuple[str, ...]]) -> str:
    return "".join(f"{name} {' '.join(rest)}\n" for name, rest in lists.items())


def test_the_mirror_has_all_that_the_library_states() -> None:
    assert lists_in_csrc() == abi.ABI


def test_numbers_are_places() -> None:
    for numbers in (abi.Event, abi.FailureKind):
        assert [int(number) for number in numbers] == [*range(len(numbers))]


@pytest.fixture
def library() -> ctypes.CDLL:
    try:
        return loader.library()
    except loader.Unavailable as reason:
        pytest.skip(str(reason))


def test_the_library_that_is_built_says_the_same_of_itself(
    library: ctypes.CDLL,
) -> None:
    assert library.xpp_abi().decode() == text_of(abi.ABI)


def test_differences_are_all_told() -> None:
    text = text_of(abi.ABI)
    assert abi.faults_of(text) == []
    assert abi.faults_of(text.replace("tile offset", "offset tile")) == [
        "row: expected tensor source tile offset run, got tensor source offset tile run"
    ]
    assert abi.faults_of(text + "more of it\n") == ["more: expected none, got of it"]
    assert len(abi.faults_of("")) == len(abi.ABI)


def test_another_library_is_not_used(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(abi.ABI, "kinds", ("F", "B"))
    with pytest.raises(
        loader.Unavailable, match="does not fit .*: kinds: expected F B,"
    ):
        loader.library.__wrapped__()
    with pytest.raises(loader.Unavailable, match="does not say what it is"):
        loader._check(ctypes.CDLL(None))


def test_a_row_has_exactly_its_fields() -> None:
    row = abi.row_of(abi.MARK_FIELDS, microbatch=3, kind=1, stage=2)
    assert row == [1, 2, 3]
    with pytest.raises(TypeError, match="expected kind, stage, microbatch, got kind"):
        abi.row_of(abi.MARK_FIELDS, kind=1)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_operands_have_each_number_as_a_low_and_a_high_word(row: list[int]) -> None:
    words = abi.words_of(row)
    assert all(-(1 << 31) <= word < 1 << 31 for word in words)
    pairs = zip(words[::2], words[1::2], strict=True)
    assert [(high << 32) + low % (1 << 32) for low, high in pairs] == row
