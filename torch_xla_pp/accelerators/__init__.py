"""Compile programs for accelerators that need not be there.

The compilers are behind the public C API of PJRT, in libraries that the user installs.
"""

from torch_xla_pp.accelerators.chips import (
    CHIP_SOURCES,
    CHIPS,
    HOP_S,
    RESERVED_BYTES,
    Chip,
)
from torch_xla_pp.accelerators.compiled_program import (
    CompiledProgram,
    DeviceCollective,
    DeviceLayout,
    ProgramBytes,
    result_bytes,
)
from torch_xla_pp.accelerators.compiler import AcceleratorCompiler
from torch_xla_pp.accelerators.hlo_module import module_of_dump, with_plain_origins
from torch_xla_pp.accelerators.host_calls import HostCalls
from torch_xla_pp.accelerators.library import CompilerLibrary
from torch_xla_pp.accelerators.link_times import exchange_s
from torch_xla_pp.accelerators.own_chips import own_chips
from torch_xla_pp.accelerators.program_time import ProgramTime
from torch_xla_pp.accelerators.topologies import Slice

__all__ = [
    "CHIPS",
    "CHIP_SOURCES",
    "HOP_S",
    "RESERVED_BYTES",
    "AcceleratorCompiler",
    "Chip",
    "CompiledProgram",
    "CompilerLibrary",
    "HostCalls",
    "DeviceCollective",
    "DeviceLayout",
    "ProgramBytes",
    "ProgramTime",
    "Slice",
    "exchange_s",
    "module_of_dump",
    "own_chips",
    "result_bytes",
    "with_plain_origins",
]
