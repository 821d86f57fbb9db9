"""The process that compiles one program: `python -m ….child_process REQUEST`.

The request is a file that `AcceleratorCompiler` writes; the answer is another one, as
libraries print what they like. A process that dies has given no answer.
"""

import json
import sys
from pathlib import Path

from torch_xla_pp.accelerators.compiled_program import CompiledProgram
from torch_xla_pp.accelerators.hlo_module import CompiledModule
from torch_xla_pp.accelerators.host_calls import HostCalls, num_host_calls
from torch_xla_pp.accelerators.plugin import PjrtPlugin, PluginError
from torch_xla_pp.accelerators.topologies import Slice
from torch_xla_pp.protobuf import messages, one_field, varint

_ANY_DEVICE = -1


def answer(request: Path) -> None:
    """Compile what a request asks for, and write what comes of it."""
    asked = json.loads(request.read_text())
    try:
        plugin = PjrtPlugin(Path(asked["library"]))
        HostCalls.from_request(asked).register(plugin)
    except (OSError, PluginError) as error:
        sys.exit(f"{asked['library']}: {error}")
    found = compiled_by(
        plugin,
        Slice.parse(asked["topology"]),
        Path(asked["program"]).read_bytes(),
    )
    path = Path(asked["answer"])
    whole = path.with_suffix(".part")
    found.to_json(whole)
    whole.rename(path)


def compiled_by(plugin: PjrtPlugin, topology: Slice, module: bytes) -> CompiledProgram:
    """Return what a plugin makes of an `HloModuleProto`."""
    try:
        devices = plugin.topology(str(topology), topology.compiler_options)
        options = compile_options(devices.device_ids)
        executable = plugin.compile(devices, module, options)
        num_bytes = plugin.memory(executable)
        costs = plugin.costs(executable)
        optimized = messages(plugin.optimized(executable), 1)[0]
    except PluginError as error:
        return CompiledProgram(error=str(error))
    read = CompiledModule.of(optimized)
    return CompiledProgram(
        num_bytes=num_bytes,
        flops=max(0.0, costs.get("flops", 0.0)),
        num_host_calls=num_host_calls(optimized),
        accessed_bytes=max(0.0, costs.get("bytes accessed", 0.0)),
        cycles=read.cycles,
        num_timed=read.num_timed,
        num_untimed=read.num_untimed,
        untimed_bytes=read.untimed_bytes,
        collectives=read.collectives,
        output_shardings=read.output_shardings,
        argument_layouts=read.argument_layouts,
        result_layouts=read.result_layouts,
    )


def compile_options(device_ids: tuple[int, ...]) -> bytes:
    """Return a `CompileOptionsProto`: one program, partitioned over devices.

    Parameters without a sharding get the one that suits the rest best.
    """
    devices = b"".join(one_field(3, one_field(1, varint(i))) for i in device_ids)
    assignment = one_field(1, 1) + one_field(2, len(device_ids)) + devices
    build = [
        one_field(1, _ANY_DEVICE),
        one_field(4, 1),  # Replicas.
        one_field(5, len(device_ids)),  # Partitions.
        one_field(6, 1),  # Use SPMD partitioning.
        one_field(9, assignment),
        one_field(12, b"\x01"),  # Sharding of outputs may be chosen.
    ]
    return one_field(3, b"".join(build))


if __name__ == "__main__":
    answer(Path(sys.argv[1]))
