"""What a Python function reads from outside of its arguments.

A compiled function has built in what it read while it was traced. Whoever compares
what it reads now with what it read then knows whether the trace still holds.
"""

from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_BY_VALUE = (int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


class _Same:
    """Stand for an object in a key: equal to itself alone, and kept alive by it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def captured_by(function: Any) -> tuple[Any, ...]:
    """Return what a function reads from outside, as far as that can be told.

    Functions are followed into closures, defaults and the globals that they name,
    objects into the attributes that the function names, modules into all. Numbers,
    texts and the like are returned by value, all else by identity.
    """
    found: list[Any] = []
    seen: set[int] = set()
    todo: list[Any] = [function]
    names: set[str] = set()
    while todo:
        value = todo.pop()
        if isinstance(value, _BY_VALUE):
            found.append(value)
        elif id(value) not in seen:
            seen.add(id(value))
            # Methods and partial functions are made anew wherever they are read.
            if not isinstance(value, (MethodType, partial)):
                found.append(_Same(value))
            todo.extend(_parts(value, names))
    return tuple(found)


def _parts(value: Any, names: set[str]) -> list[Any]:
    """Return what a value reads when it is called.

    Args:
        value: Any object.
        names: What the functions so far name; grows by what this one does.
    """
    match value:
        case FunctionType():
            return [] if _is_library(value) else _parts_of_function(value, names)
        case MethodType():
            return [value.__self__, value.__func__]
        case partial():
            return [*value.args, *value.keywords.values(), value.func]
        case nn.Module() if not _is_library(type(value)):
            return [type(value).forward, *vars(value).values()]
        case nn.Module():
            return list(vars(value).values())
        case dict():
            return list(value.values())
        case list() | tuple():
            return list(value)
        case Tensor() | type() | ModuleType():
            return []
    call = vars(type(value)).get("__call__")
    read = _parts_of_function(call, names) if isinstance(call, FunctionType) else []
    own = getattr(value, "__dict__", {})
    return [*read, *(x for name, x in own.items() if name in names)]


def _parts_of_function(function: FunctionType, names: set[str]) -> list[Any]:
    named = function.__code__.co_names
    names.update(named)
    inner = [x for x in function.__code__.co_consts if isinstance(x, CodeType)]
    for code in inner:
        names.update(code.co_names)
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
    defaults = [
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    ]
    known = function.__globals__
    return [
        *(known[name] for name in sorted(names) if name in known),
        *cells,
        *defaults,
    ]


def _is_set(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # an empty cell raises
    except ValueError:
        return False
    return True


def _is_library(value: Any) -> bool:
    """Return whether a function or class is PyTorch's own, and needs no look."""
    return str(value.__module__).partition(".")[0] in ("torch", "torch_xla")
