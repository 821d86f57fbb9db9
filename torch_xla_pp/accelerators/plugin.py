"""A compiler behind the C API of PJRT, without its devices.

Only what a compilation needs: a topology, which describes devices that need not be
there, a program compiled for it, and what the compiler says of the result. A faulty
program may abort the process, so only `child_process` uses this file.

Every argument of the API is a struct that begins with its own size; the table of
functions only grows at its end. So numbers of functions stay as they are.

Source: xla/pjrt/c/pjrt_c_api.h of OpenXLA.
"""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

from torch_xla_pp.accelerators.compiled_program import ProgramBytes

_HEADER_BYTES = 40
_EXTENSIONS_AT = 8
_MINOR_VERSION_AT = 36
_FUNCTIONS = {
    "error message": 1,
    "initialize": 3,
    "describe device": 23,
    "device attributes": 24,
    "cost analysis": 46,
    "optimized program": 48,
    "make topology": 82,
    "devices of topology": 86,
    "compile": 89,
    "memory": 96,
}
# An extension: its size, its kind, the next one, and functions. Of that for FFI's
# handlers the third one registers.
_KIND_AT, _NEXT_AT, _REGISTER_AT = 8, 16, 40
_FFI = 5
_HOST = b"Host"
_SPARE_BYTES = 256
_TEXT, _INTEGERS, _FLOAT = 0, 2, 3
_MINOR_WITH_PEAK = 76

TopologyOption = str | Sequence[int]


class PluginError(Exception):
    """What a plugin says is wrong, in its own words."""


class _NamedValue(ctypes.Structure):
    """A `PJRT_NamedValue`: a name, with a text, a number, or several."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("name", c_char_p),
        ("name_size", c_size_t),
        ("kind", c_int),
        ("value", c_int64),
        ("value_size", c_size_t),
    ]


class _Program(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("code", c_char_p),
        ("code_size", c_size_t),
        ("format", c_char_p),
        ("format_size", c_size_t),
    ]


class PjrtPlugin:
    """A loaded library with a `GetPjrtApi`.

    Args:
        path: The library.

    Raises:
        OSError: It cannot be loaded.
        PluginError: It cannot be initialized.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.GetPjrtApi.restype = c_void_p
        self._api = library.GetPjrtApi()
        self._minor = c_int.from_address(self._api + _MINOR_VERSION_AT).value
        self._call("initialize", _arguments())

    @property
    def knows_handlers(self) -> bool:
        """Return whether calls of the host need handlers that are registered."""
        return self._ffi() is not None

    def register(self, target: str, handler: int) -> None:
        """Let programs call a handler of XLA's typed FFI on the host.

        Args:
            target: What programs call it.
            handler: Its address.

        Raises:
            PluginError: The plugin refuses it.
        """
        extension, name = self._ffi(), target.encode()
        if extension is None:
            raise PluginError("it has no extension for handlers of FFI")
        fields = (
            ("struct_size", c_size_t),
            ("target", c_char_p),
            ("target_size", c_size_t),
            ("handler", c_void_p),
            ("platform", c_char_p),
            ("platform_size", c_size_t),
            ("traits", c_int),
        )
        kind = type("Handler", (ctypes.Structure,), {"_fields_": fields})
        asked = kind(
            ctypes.sizeof(kind), name, len(name), handler, _HOST, len(_HOST), 0
        )
        self._call_at(extension + _REGISTER_AT, asked)

    def _ffi(self) -> int | None:
        """Return where the extension for FFI is, None if there is none."""
        at = c_void_p.from_address(self._api + _EXTENSIONS_AT).value
        while at and c_int.from_address(at + _KIND_AT).value != _FFI:
            at = c_void_p.from_address(at + _NEXT_AT).value
        return at

    def topology(
        self, name: str, options: Mapping[str, TopologyOption]
    ) -> "DescribedDevices":
        """Describe devices, such as `v5e:2x2`.

        Raises:
            PluginError: There are none of that name.
        """
        kept = [_option(key, value) for key, value in options.items()]
        values = (_NamedValue * max(1, len(kept)))(*(value for value, _ in kept))
        made = self._call(
            "make topology",
            _arguments(
                name=c_char_p(name.encode()),
                name_size=c_size_t(len(name.encode())),
                options=c_void_p(ctypes.addressof(values)),
                num_options=c_size_t(len(kept)),
                topology=c_void_p(),
            ),
        )
        found = self._call(
            "devices of topology",
            _arguments(
                topology=c_void_p(made.topology),
                devices=POINTER(c_void_p)(),
                num_devices=c_size_t(),
            ),
        )
        devices = [found.devices[i] for i in range(found.num_devices)]
        return DescribedDevices(made.topology, tuple(map(self._device_id, devices)))

    def compile(
        self, topology: "DescribedDevices", hlo: bytes, options: bytes
    ) -> "CompiledHandle":
        """Compile an `HloModuleProto` with a `CompileOptionsProto`.

        Raises:
            PluginError: It cannot be compiled, or does not fit.
        """
        name = b"hlo"
        program = _Program(
            ctypes.sizeof(_Program), None, hlo, len(hlo), name, len(name)
        )
        made = self._call(
            "compile",
            _arguments(
                topology=c_void_p(topology.handle),
                program=c_void_p(ctypes.addressof(program)),
                options=c_char_p(options),
                options_size=c_size_t(len(options)),
                client=c_void_p(),
                executable=c_void_p(),
            ),
        )
        return CompiledHandle(made.executable)

    def memory(self, executable: "CompiledHandle") -> ProgramBytes:
        """Return what a program takes on one device."""
        names = ["code", "arguments", "outputs", "aliased", "temporaries"]
        names += [f"host_{name}" for name in names]
        names += ["peak"] if self._minor >= _MINOR_WITH_PEAK else []
        counts = {name: c_int64() for name in names}
        handle = c_void_p(executable.handle)
        found = self._call("memory", _arguments(executable=handle, **counts))
        return ProgramBytes(
            arguments=found.arguments,
            outputs=found.outputs,
            aliased=found.aliased,
            temporaries=found.temporaries,
            code=found.code,
        )

    def costs(self, executable: "CompiledHandle") -> dict[str, float]:
        """Return the compiler's own estimates of numbers, such as `flops`."""
        found = self._call(
            "cost analysis",
            _arguments(
                executable=c_void_p(executable.handle),
                num_values=c_size_t(),
                values=POINTER(_NamedValue)(),
            ),
        )
        values = [found.values[i] for i in range(found.num_values)]
        return {
            value.name[: value.name_size].decode(): _number(value) for value in values
        }

    def optimized(self, executable: "CompiledHandle") -> bytes:
        """Return the compiled program as an `HloModuleProtoWithConfig`."""
        program = _Program(ctypes.sizeof(_Program), None, None, 0, None, 0)
        where = c_void_p(ctypes.addressof(program))
        handle = c_void_p(executable.handle)
        found = _arguments(executable=handle, program=where)
        self._call("optimized program", found)
        buffer = ctypes.create_string_buffer(program.code_size)
        program.code = ctypes.cast(buffer, c_char_p)
        self._call("optimized program", found)
        return buffer.raw

    def _device_id(self, device: int) -> int:
        arguments = _arguments(device=c_void_p(device), id=c_int())
        return int(self._call("describe device", arguments).id)

    def _call(self, name: str, arguments: Any) -> Any:
        """Call a function, which writes its results into `arguments`."""
        return self._call_at(self._at(name), arguments)

    def _call_at(self, at: int, arguments: Any) -> Any:
        """Call the function whose address is at a place."""
        error = _function_at(at)(ctypes.addressof(arguments))
        if error:
            raise PluginError(self._message(error))
        return arguments

    def _at(self, name: str) -> int:
        return int(self._api) + _HEADER_BYTES + 8 * _FUNCTIONS[name]

    def _message(self, error: int) -> str:
        asked = _arguments(error=c_void_p(error), text=c_void_p(), size=c_size_t())
        _function_at(self._at("error message"))(ctypes.addressof(asked))
        return ctypes.string_at(asked.text, asked.size).decode(errors="replace")


class DescribedDevices(NamedTuple):
    """Devices that need not be there.

    Attributes:
        handle: The plugin's own.
        device_ids: Of each device, in order.
    """

    handle: int
    device_ids: tuple[int, ...]


class CompiledHandle(NamedTuple):
    """A compiled program.

    Attributes:
        handle: The plugin's own.
    """

    handle: int


def _function_at(at: int) -> Any:
    """Return the function whose address is at a place."""
    address = c_void_p.from_address(at).value or 0
    return ctypes.CFUNCTYPE(c_void_p, c_void_p)(address)


def _arguments(**values: Any) -> Any:
    """Return a struct of arguments: its size, extensions, and the given fields.

    Newer plugins write fields that are not known here, for which there is room.
    """
    named = [(name, type(value)) for name, value in values.items()]
    fields = [("struct_size", c_size_t), ("extension", c_void_p), *named]
    fields.append(("spare", ctypes.c_char * _SPARE_BYTES))
    made = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
    return made(ctypes.sizeof(made) - _SPARE_BYTES, None, *values.values())


def _option(name: str, value: TopologyOption) -> tuple[_NamedValue, Any]:
    """Return an option, and what must live as long as it."""
    kept: Any
    if isinstance(value, str):
        kind, kept, size = (
            _TEXT,
            ctypes.create_string_buffer(value.encode()),
            len(value),
        )
    else:
        kind, kept, size = _INTEGERS, (c_int64 * len(value))(*value), len(value)
    encoded, at = name.encode(), ctypes.addressof(kept)
    struct_size = ctypes.sizeof(_NamedValue)
    made = _NamedValue(struct_size, None, encoded, len(encoded), kind, at, size)
    return made, kept


def _number(value: _NamedValue) -> float:
    """Return a value that is a 32-bit number with a fraction, or a 64-bit integer."""
    if value.kind != _FLOAT:
        return float(value.value)
    at = _NamedValue.value.offset
    return ctypes.c_float.from_buffer_copy(value, at).value
