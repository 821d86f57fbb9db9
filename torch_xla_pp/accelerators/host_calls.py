"""Calls of the host from inside a program, and the targets that a compiler must know.

A compiler for accelerators accepts such a call if a handler of XLA's typed FFI is
registered for its target. It only asks the handler for its signature.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_xla_pp.accelerators.plugin import PjrtPlugin
from torch_xla_pp.protobuf import fields_of, messages

# Fields of HloModuleProto, HloComputationProto and HloInstructionProto.
_COMPUTATIONS, _INSTRUCTIONS, _OPCODE, _THREAD = 3, 2, 2, 79
_FUNCTION = "xpp_handler"
_REQUEST = "host_calls"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCalls:
    """The targets of a program's calls, and their handlers.

    Args:
        library: The compiled library of this package.
        targets: Target → number of the op in that library.
    """

    library: Path = Path()
    targets: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_request(cls, asked: Mapping[str, Any]) -> "HostCalls":
        """Read what `to_request` has written; there may be none."""
        library, targets = asked.get(_REQUEST, ("", {}))
        return cls(library=Path(library), targets=targets)

    def to_request(self) -> dict[str, Any]:
        """Return it as a part of a request, which is written as JSON."""
        return {_REQUEST: (str(self.library), dict(self.targets))}

    def register(self, plugin: PjrtPlugin) -> None:
        """Register them with a plugin, unless it accepts calls without handlers.

        Raises:
            OSError: The library, or UCX that it needs, cannot be loaded.
            PluginError: The plugin refuses one.
        """
        if not self.targets or not plugin.knows_handlers:
            return
        import libucx

        libucx.load_library()
        handler = getattr(ctypes.CDLL(str(self.library)), _FUNCTION)
        handler.restype, handler.argtypes = ctypes.c_void_p, [ctypes.c_int32]
        for target, op in self.targets.items():
            plugin.register(target, handler(op))


def num_host_calls(module: bytes) -> int:
    """Return how often a compiled `HloModuleProto` calls the host.

    Adjacent calls count as one: the compiler makes one computation of them.
    """
    instructions = [
        dict(fields_of(instruction))
        for computation in messages(module, _COMPUTATIONS)
        for instruction in messages(computation, _INSTRUCTIONS)
    ]
    starts = [one for one in instructions if one.get(_OPCODE) == b"async-start"]
    return sum(one.get(_THREAD) == b"host" for one in starts)
