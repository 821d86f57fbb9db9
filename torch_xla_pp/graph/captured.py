"""Values that Python code reads from outside of its arguments.

A compiled program has built in the values that were read while it was traced. Comparing
them with those that are read now shows whether the trace still holds.

Terms: a *finding* is a label and the value that was found there, compared by value for
numbers, texts and the like, by identity for everything else. Containers that were
looked into are *watched*: as long as every one of them holds the same objects, nothing
needs to be looked at again. Watching takes some 2 µs per module, looking some hundred.

Followed are: functions into their closures, defaults, the globals that they name, and
the methods of classes that they name; modules into their attributes, hooks and parts;
other objects into the attributes that some function names. Of installed code (such as
the standard library) and of this package only the names count, and PyTorch's own is not
looked at. Not seen
are: changes inside objects that are none of these, such as open files, and globals
of functions that no followed one names.
"""

import dis
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from operator import is_, itemgetter
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, fx, nn

from torch_xla_pp.graph.modes import OtherMode, is_set

_NUMBERS = (int, float, complex, np.generic)
_BY_VALUE = (*_NUMBERS, str, bytes, range, type(None), torch.dtype, torch.device)
_ALWAYS_CALLED = frozenset({"forward", "__call__"})
# Functions with which code may read attributes whose names it computes.
_DYNAMIC = frozenset({"getattr", "vars", "__dict__", "__getattr__", "__getattribute__"})
# Attributes that torch's modules read of themselves when they are called.
_READ_BY_MODULES = frozenset(
    {
        "training",
        "forward",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
        "_backward_hooks",
        "_backward_pre_hooks",
    }
)
_TORCH = ("torch", "torch_xla")
_PACKAGE = ("torch_xla_pp",)
_OPAQUE = (*_TORCH, *_PACKAGE, "logging", "threading", "weakref")
# Attributes of every module.
_BASE = frozenset(vars(nn.Module()))
_BASE_OF_GRAPHS = frozenset(vars(fx.GraphModule(nn.Module(), fx.Graph())))
_BASE_OF_GRAPHS |= {"_graph", "_code", "_lineno_map", "_prologue_start", "meta"}
_BASE_OF_GRAPHS |= {"_in_spec", "_out_spec", "_codegen"}
# By these a function may reach its globals, or its module.
_REACHING = frozenset({"globals", "vars", "eval", "exec", "__globals__"})
_REACHING |= {"modules", "import_module", "__import__"}
_MISSING = object()
_NOTHING = (str, "nothing")
# Values that a traced stage follows.
_FOLLOWED = re.compile(r"(^|\.)(training|_code)$|_hooks\[")
_HOOK = re.compile(r"(?P<part>^|\.)_(forward|backward)\w*hooks\w*\[\d+\]$")


class _Same:
    """An object in a finding: equal to itself alone, and kept alive by it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"a {type(self.value).__name__}"


class Captured:
    """The numbered states of the values that a function or module reads from outside.

    The values of a module's own parameters and buffers do not count, as programs get
    them as arguments; their metadata and `requires_grad` do.

    Args:
        root: What is called.
        is_kept: Whether it is kept alive; if not, its last state counts after its end.

    Attributes:
        num_walks: How often a container had changed; between two of these every
            container held the same objects.
    """

    def __init__(self, root: Any, *, is_kept: bool = True) -> None:
        self._root = (lambda: root) if is_kept else ref(root)
        self._names = set(_ALWAYS_CALLED)
        self._watch: _Watch | None = None
        self._known: dict[frozenset[tuple[str, Any]], int] = {}
        self._current = 0
        self.num_walks = 0

    def number(self) -> int:
        """Return the number of the present state, equal for equal states."""
        root = self._root()
        if root is None:
            # Watched containers may hold parts of it.
            self._watch = None
            return self._current
        if self._watch is None or not self._watch.is_same():
            walk = _walked(root, self._names)
            self._watch = walk.watch
            self.num_walks += 1
            self._current = self._known.setdefault(
                frozenset(walk.findings), len(self._known)
            )
        return self._current

    def difference(self, old: int, new: int) -> str:
        """Describe what differs between two states, e.g. "drop.p: 0.1 -> 0.2"."""
        return ", ".join(
            f"{label}: {_shown(before)} -> {_shown(after)}"
            for label, (before, after) in self._changes(old, new).items()
        )

    def values_changed(self, old: int, new: int) -> str:
        """Name the values and functions that differ, except `training` and hooks."""
        return ", ".join(
            f"{label}: {_shown(before)} -> {_shown(after)}"
            for label, (before, after) in self._changes(old, new).items()
            if not _FOLLOWED.search(label) and _is_value(before) and _is_value(after)
        )

    def hooks_changed(self, old: int, new: int, *, of_root: bool) -> str:
        """Name the parts with other hooks, and the root if that counts."""
        found = ((label, _HOOK.search(label)) for label in self._changes(old, new))
        return ", ".join(label for label, m in found if m and (of_root or m["part"]))

    def _changes(self, old: int, new: int) -> dict[str, tuple[Any, Any]]:
        """Return label → the findings before and after."""
        states = list(self._known)
        before, after = dict(states[old]), dict(states[new])
        labels = sorted({label for label, _ in states[old] ^ states[new]})
        return {x: (before.get(x, _NOTHING), after.get(x, _NOTHING)) for x in labels}


def captured_by(root: Any) -> frozenset[tuple[str, Any]]:
    """Return what a function or module reads from outside, as label and value."""
    return frozenset(_walked(root, set(_ALWAYS_CALLED)).findings)


def _walked(root: Any, names: set[str]) -> "_Walk":
    """Look at everything; again, as long as code is found that names something new."""
    while True:
        count = len(names)
        walk = _Walk(root, names)
        if len(names) == count:
            return walk


def _is_value(found: Any) -> bool:
    """Return whether a finding is a number, a text, a function or the like."""
    if isinstance(found, _Same):
        return isinstance(found.value, (CodeType, BuiltinFunctionType))
    return isinstance(found, tuple) and isinstance(found[0], type)


def _shown(found: Any) -> str:
    if isinstance(found, _Same) and isinstance(found.value, CodeType):
        return found.value.co_name
    value = found[1] if isinstance(found, tuple) and len(found) == 2 else found
    return str(value)


class _Watch:
    """The contents of containers, to tell whether they have changed."""

    def __init__(self) -> None:
        self._empty: list[Any] = []
        self._dicts: list[tuple[Any, list[Any], list[Any]]] = []
        self._modules: list[tuple[dict[str, Any], int, Any, tuple[Any, ...]]] = []
        self._sequences: list[tuple[Any, list[Any]]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        self._attributes: list[tuple[Any, str, Any]] = []
        self._arrays: list[tuple[Any, bytes]] = []
        self._parameters: list[Tensor] = []
        self._flags: list[tuple[bool, torch.dtype]] = []
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def add(self, container: Any) -> None:
        """Watch a dict, list or set."""
        if not container:
            self._empty.append(container)
        elif isinstance(container, dict):
            entry = (container, list(container), list(container.values()))
            self._dicts.append(entry)
        else:
            self._sequences.append((container, list(container)))

    def add_module(self, module: nn.Module) -> None:
        """Watch the attributes that not every module has, and `training`."""
        held = vars(module)
        # At least two, for a tuple. A compiled module has no mode of its own.
        mode = ["training"] if "training" in held else []
        others = (x for x in held if x not in _BASE)
        names = ["_modules", "_modules", *mode, *others]
        getter = itemgetter(*names)
        self._modules.append((held, len(held), getter, getter(held)))

    def add_slot(self, container: Mapping[str, Any], name: str) -> None:
        """Watch one item of a mapping, which may not be there."""
        self._slots.append((container, name, container.get(name, _MISSING)))

    def add_attribute(self, owner: Any, name: str) -> None:
        """Watch one attribute, which may not be there."""
        self._attributes.append((owner, name, getattr(owner, name, _MISSING)))

    def add_array(self, array: "np.ndarray[Any, Any]") -> None:
        """Watch the numbers of an array."""
        self._arrays.append((array, array.tobytes()))

    def add_parameter(self, value: Tensor) -> None:
        """Watch `requires_grad` and dtype."""
        self._parameters.append(value)
        self._flags.append((value.requires_grad, value.dtype))

    def add_buffers(self, buffers: dict[str, Any]) -> None:
        """Watch the metadata of buffers; their objects change in every step."""
        self._buffers.append((buffers, dict(buffers)))

    def is_same(self) -> bool:
        """Return whether nothing that is watched has changed."""
        try:
            return self._is_same()
        except KeyError:
            return False

    def _is_same(self) -> bool:
        if any(self._empty):
            return False
        for held, count, getter, values in self._modules:
            if len(held) != count or not all(map(is_, getter(held), values)):
                return False
        for container, keys, known in self._dicts:
            if list(container) != keys:
                return False
            if not all(map(is_, container.values(), known)):
                return False
        for container, items in self._sequences:
            if len(container) != len(items) or not all(map(is_, container, items)):
                return False
        for mapping, name, value in self._slots:
            if mapping.get(name, _MISSING) is not value:
                return False
        for owner, name, value in self._attributes:
            if getattr(owner, name, _MISSING) is not value:
                return False
        if [(p.requires_grad, p.dtype) for p in self._parameters] != self._flags:
            return False
        if any(array.tobytes() != data for array, data in self._arrays):
            return False
        return all(_look_alike(now, then) for now, then in self._buffers)


def _look_alike(now: dict[str, Any], then: dict[str, Any]) -> bool:
    """Return whether buffers have the same metadata; remembers new ones that have."""
    if all(map(is_, now.values(), then.values())) and list(now) == list(then):
        return True
    if {k: _look(v) for k, v in now.items()} != {k: _look(v) for k, v in then.items()}:
        return False
    then.update(now)
    return True


def _look(value: Tensor | None) -> Any:
    return None if value is None else (value.dtype, tuple(value.shape))


class _Walk:
    """A walk over all values that are read, starting from a function or module.

    Args:
        root: Where to start.
        names: The names in the code so far; grows with the code that is found.

    Attributes:
        findings: Label → the value that was found.
        watch: The containers that were looked into.
    """

    def __init__(self, root: Any, names: set[str]) -> None:
        self.findings: list[tuple[str, Any]] = []
        self.watch = _Watch()
        self._names = names
        self._seen: set[int] = set()
        # Objects made during the walk must be kept alive, or ids are reused.
        self._kept: list[Any] = []
        self._names_of: dict[int, str] = {}
        self._own = set(root.modules()) if isinstance(root, nn.Module) else set()
        self._todo: list[tuple[str, Any]] = [("", root)]
        while self._todo:
            self._visit(*self._todo.pop())

    def _visit(self, label: str, value: Any) -> None:
        if isinstance(value, _BY_VALUE):
            self.findings.append((label, _exactly(value)))
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        match value:
            case OtherMode():
                # It holds parts of a graph that the stage does not have now.
                return
            case nn.Module():
                self._visit_module(label, value)
            case dict():
                self.watch.add(value)
                self._add((f"{label}[{key!r}]", x) for key, x in value.items())
            case list() | set() | tuple() | frozenset():
                if isinstance(value, (list, set)):
                    self.watch.add(value)
                self.findings.append((f"len({label})", _exactly(len(value))))
                self._add((f"{label}[{i}]", x) for i, x in enumerate(value))
            case FunctionType():
                self._visit_function(label, value)
            case MethodType():
                # Made anew wherever it is read, as are partial functions.
                self._add([(label, value.__func__), (f"{label}.self", value.__self__)])
            case partial():
                self._add([(label, value.func), (f"{label}.args", value.args)])
                self._add([(f"{label}.keywords", value.keywords)])
            case property():
                self._add([(label, value.fget)])
            case staticmethod() | classmethod():
                self._add([(label, value.__func__)])
            case np.ndarray():
                self.watch.add_array(value)
                self.findings.append((label, (value.shape, value.tobytes())))
            case ModuleType():
                self._visit_namespace(value)
            case _:
                self.findings.append((label, _Same(value)))
                if not isinstance(value, type) and not _is_opaque(type(value)):
                    self._visit_object(label, value)

    def _add(self, found: Iterator[tuple[str, Any]] | list[tuple[str, Any]]) -> None:
        self._todo.extend(found)

    def _visit_module(self, label: str, module: nn.Module) -> None:
        dot = f"{label}." if label else ""
        cls, held = type(module), vars(module)
        self.watch.add_module(module)
        self.findings.append((label, _Same(cls)))
        is_torch, is_graph = _is_torch(cls), isinstance(module, fx.GraphModule)
        if is_graph:
            self.watch.add_attribute(module, "_code")
            self.findings.append((f"{dot}_code", _exactly(module.code)))
        if not is_torch:
            self._visit_class(cls)
        is_all = is_torch or not _DYNAMIC.isdisjoint(self._names)
        for name, value in held.items():
            if name == "_modules":
                self.watch.add(value)
                self._add((f"{dot}{key}", x) for key, x in value.items())
            elif name in ("_parameters", "_buffers") and module in self._own:
                self._visit_tensors(dot, value, is_buffer=name == "_buffers")
            elif name in _READ_BY_MODULES and isinstance(value, dict):
                # Hooks, keyed by increasing numbers.
                self.watch.add(value)
                hooks = enumerate(value.values())
                self._add((f"{dot}{name}[{i}]", hook) for i, hook in hooks)
            elif name in ("_parameters", "_buffers") or name in _READ_BY_MODULES:
                self._add([(f"{dot}{name}", value)])
            elif name in _BASE or (is_graph and name in _BASE_OF_GRAPHS):
                continue
            elif is_all or name in self._names:
                self._add([(f"{dot}{name}", value)])

    def _visit_tensors(
        self, dot: str, held: dict[str, Any], *, is_buffer: bool
    ) -> None:
        """Look at parameters or buffers, whose values programs get as arguments."""
        self.watch.add_buffers(held) if is_buffer else self.watch.add(held)
        for name, value in held.items():
            found = _look(value)
            if value is not None and not is_buffer:
                self.watch.add_parameter(value)
                first = self._names_of.setdefault(id(value), f"{dot}{name}")
                if first != f"{dot}{name}":
                    self.findings.append((f"{dot}{name} shared", first))
                self.findings.append(
                    (f"{dot}{name}.requires_grad", value.requires_grad)
                )
            self.findings.append((f"{dot}{name}", found))

    def _visit_class(self, cls: type) -> None:
        """Look at the methods and values of a class that some function names."""
        if id(cls) in self._seen or _is_torch(cls) or cls.__module__ == "builtins":
            return
        self._seen.add(id(cls))
        for base in cls.__mro__:
            if _is_torch(base) or base.__module__ == "builtins":
                continue
            known = vars(base)
            for name in sorted(self._names.intersection(known)):
                self.watch.add_slot(known, name)
                self._add([(f"{base.__qualname__}.{name}", known[name])])

    def _visit_object(self, label: str, value: Any) -> None:
        """Look at the attributes of an object that some function names."""
        cls = type(value)
        self._visit_class(cls)
        held = getattr(value, "__dict__", {})
        known = [vars(base) for base in cls.__mro__ if base is not object]
        for name in sorted(self._names):
            if name in held or any(name in names for names in known):
                self.watch.add_slot(held, name)
            if name in held:
                self._add([(f"{label}.{name}", held[name])])
        for name in sorted(_slots_of(cls.__mro__) & self._names):
            self.watch.add_attribute(value, name)
            self._add([(f"{label}.{name}", getattr(value, name, None))])

    def _visit_function(self, label: str, function: FunctionType) -> None:
        self.findings.append((label, _Same(function.__code__)))
        if _is_torch(function):
            return
        self._names.update(_names_in(function.__code__))
        is_own = _is_of(str(function.__module__), _PACKAGE)
        if is_own or _is_installed(function.__code__.co_filename):
            return
        known = function.__globals__
        for name in sorted(_globals_in(function.__code__).intersection(known)):
            self.watch.add_slot(known, name)
            self._add([(f"global {name}", known[name])])
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            self.watch.add_attribute(cell, "cell_contents")
            if is_set(cell):
                self._add([(f"{name} of a closure", cell.cell_contents)])
        self.watch.add_attribute(function, "__defaults__")
        self._add([(f"{label} defaults", function.__defaults__)])
        self._add([(f"{label} defaults", function.__kwdefaults__ or ())])

    def _visit_namespace(self, module: ModuleType) -> None:
        """Look at what functions name of a Python module, unless it is installed."""
        file = getattr(module, "__file__", None) or "<built in>"
        if _is_of(module.__name__, _PACKAGE) or _is_installed(file):
            return
        known = vars(module)
        for name in sorted(self._names.intersection(known)):
            self.watch.add_slot(known, name)
            self._add([(f"{module.__name__}.{name}", known[name])])


def _exactly(value: Any) -> tuple[type, Any]:
    """Return a text that distinguishes equal numbers such as 0.0 and -0.0."""
    is_number = isinstance(value, (float, complex, np.generic))
    return type(value), repr(value) if is_number else value


@lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """Return all names and texts in a function, and in those within it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            found.add(constant)
    return frozenset(found)


@lru_cache(maxsize=4096)
def _globals_in(code: CodeType) -> frozenset[str]:
    """Return the names and texts in a function that may be those of globals.

    Names of attributes are not, unless it may reach its globals as an object, as by an
    import of its own module.
    """
    names, found = _names_in(code), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME" and _may_be_own(instruction.argval):
            return names
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _globals_in(constant)
        elif isinstance(constant, str):
            found.add(constant)
    return names if names & _REACHING else frozenset(found)


@lru_cache(maxsize=4096)
def _slots_of(classes: tuple[type, ...]) -> frozenset[str]:
    found: set[str] = set()
    for base in classes:
        slots = vars(base).get("__slots__", ())
        found |= {slots} if isinstance(slots, str) else set(slots)
    return frozenset(found)


@lru_cache(maxsize=4096)
def _is_installed(file_name: str) -> bool:
    """Return whether a file is one that programs do not change, or none at all."""
    if file_name.startswith("<"):
        return file_name == "<built in>" or file_name.startswith("<frozen")
    paths = sysconfig.get_paths()
    known = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(file_name.startswith(path) for path in known)


def _is_torch(value: Any) -> bool:
    """Return whether a function or class is PyTorch's own, which is not looked into."""
    return _is_of(str(value.__module__), _TORCH)


def _is_of(module: str, packages: Sequence[str]) -> bool:
    return module.partition(".")[0] in packages


def _is_opaque(cls: type) -> bool:
    """Return whether no forward reads the attributes of such an object."""
    return _is_of(str(cls.__module__), _OPAQUE)


def _may_be_own(name: str) -> bool:
    """Return whether an import of this name may be one of a program's own modules."""
    # Folders of modules without a file of their own have none.
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or not _is_installed(file)
