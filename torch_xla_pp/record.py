"""Frozen dataclasses as JSON, and back.

Fields may be numbers, texts, truth values, None, tuples, mappings with texts as keys,
and such dataclasses. All faults are listed at once, each with its path:
`works[3].forward.flops`.
"""

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_FORMAT = "format"


def text_of(source: str | Path) -> str:
    """Return a text, which is recognised by its line ends, or that in a file."""
    is_text = isinstance(source, str) and "\n" in source
    return str(source) if is_text else Path(source).read_text()


def to_json(value: Any, text_format: str, path: str | Path | None) -> str:
    """Return a dataclass as JSON; equal values give equal texts.

    Args:
        value: The dataclass.
        text_format: The name of the format in the text, such as "torch_xla_pp plan 1".
        path: A file to write as well, None for none.
    """
    record = {_FORMAT: text_format, **_plain(value)}
    text = json.dumps(record, indent=1, allow_nan=False, sort_keys=False) + "\n"
    if path is not None:
        Path(path).write_text(text)
    return text


def from_json(kind: type[_T], source: str | Path, text_format: str) -> _T:
    """Read what `to_json` wrote: a file, or the text itself.

    Raises:
        ValueError: It is no JSON, of another format, or has missing, unknown or
            faulty fields; all are named.
    """
    try:
        data = json.loads(text_of(source))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{text_format}: expected JSON, got a text that is none ({error}). Pass "
            "the file that was written."
        ) from None
    found = data.get(_FORMAT) if isinstance(data, dict) else None
    if found != text_format:
        raise ValueError(
            f"{text_format}: expected a record with that format, got {found!r}. Write "
            "it again with this version, or pass the right file."
        )
    rest = {name: value for name, value in data.items() if name != _FORMAT}
    faults: list[str] = []
    value = _read(kind, rest, "", faults)
    if faults:
        raise ValueError("\n".join(f"{text_format}: {fault}" for fault in faults))
    read: _T = value
    return read


def _plain(value: Any) -> Any:
    """Convert dataclasses, mappings and tuples to values of JSON."""
    if dataclasses.is_dataclass(value):
        kind: Any = type(value)
        return {
            name: _number_or(hint, getattr(value, name))
            for name, hint in _fields_of(kind)[0].items()
        }
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in sorted(value.items())}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _number_or(kind: Any, item: Any) -> Any:
    """Write a whole number as 1.0 if the field may also have fractions."""
    return float(item) if kind is float else _plain(item)


def _read(kind: Any, data: Any, path: str, faults: list[str]) -> Any:
    """Return the value that `data` stands for, and note all faults."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if data is None:
            return None
        kind = next(a for a in get_args(kind) if a is not type(None))
        return _read(kind, data, path, faults)
    if origin is tuple:
        return _read_tuple(kind, data, path, faults)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            return _fault(path, "a table", data, faults)
        item = get_args(kind)[1]
        return {k: _read(item, v, f"{path}[{k!r}]", faults) for k, v in data.items()}
    if dataclasses.is_dataclass(kind):
        return _read_record(kind, data, path, faults)
    if origin is Literal:
        if data in get_args(kind):
            return data
        return _fault(path, f"one of {', '.join(get_args(kind))}", data, faults)
    return _read_plain(kind, data, path, faults)


def _read_tuple(kind: Any, data: Any, path: str, faults: list[str]) -> Any:
    parts = get_args(kind)
    if not isinstance(data, list):
        return _fault(path, "a list", data, faults)
    if parts[-1] is Ellipsis:
        parts = (parts[0],) * len(data)
    if len(parts) != len(data):
        return _fault(path, f"{len(parts)} items", data, faults)
    items = enumerate(zip(parts, data, strict=True))
    return tuple(_read(p, value, f"{path}[{i}]", faults) for i, (p, value) in items)


def _read_record(kind: Any, data: Any, path: str, faults: list[str]) -> Any:
    if not isinstance(data, dict):
        return _fault(path, f"the fields of {kind.__name__}", data, faults)
    hints, needed = _fields_of(kind)
    prefix = f"{path}." if path else ""
    unknown = sorted(set(data) - set(hints))
    missing = sorted(needed - set(data))
    faults += [
        f"{prefix}{name}: expected no such field. Known are {', '.join(hints)}."
        for name in unknown
    ]
    faults += [
        f"{prefix}{name}: expected this field, got none. Add it." for name in missing
    ]
    known = len(faults)
    values = {
        name: _read(hints[name], value, prefix + name, faults)
        for name, value in data.items()
        if name in hints
    }
    if missing or len(faults) > known:
        return None
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        faults += [
            f"{path}: {line}" if path else line for line in str(error).split("\n")
        ]
        return None


def _read_plain(kind: Any, data: Any, path: str, faults: list[str]) -> Any:
    if kind is float:
        if isinstance(data, int | float) and not isinstance(data, bool):
            if math.isfinite(data):
                return float(data)
        return _fault(path, "a finite number", data, faults)
    if kind is int and isinstance(data, bool):
        return _fault(path, "a whole number", data, faults)
    if isinstance(data, kind):
        return data
    names = {int: "a whole number", str: "a text", bool: "true or false"}
    return _fault(path, names[kind], data, faults)


def _fault(path: str, expected: str, data: Any, faults: list[str]) -> None:
    faults.append(f"{path or 'record'}: expected {expected}, got {data!r}. Correct it.")


@cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], set[str]]:
    """Return the types of a dataclass's fields, and the fields that must be given."""
    hints = get_type_hints(kind)
    fields = dataclasses.fields(kind)
    none = dataclasses.MISSING
    needed = {f.name for f in fields if f.default is none and f.default_factory is none}
    return {f.name: hints[f.name] for f in fields}, needed
