"""Programs that send and receive themselves compile for devices that are not here."""

import re
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerators.written_hlo import computation, instruction, module, shape
from joining import join

from torch_xla_pp import native, xla_compat
from torch_xla_pp.accelerators import (
    AcceleratorCompiler,
    CompiledProgram,
    CompilerLibrary,
    HostCalls,
    Slice,
)
from torch_xla_pp.accelerators.host_calls import num_host_calls
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.hlo import parse_sharding
from torch_xla_pp.native import abi, loader, notes
from torch_xla_pp.protobuf import one_field
from torch_xla_pp.testing import Worlds
from torch_xla_pp.transport import Message, ShardLayout, receive_op, send_op

ROWS, COLUMNS = (parse_sharding(f"{{devices={d}0,1,2,3}}") for d in ("[4,1]", "[1,4]"))
NAME = Message("F", 1, 0, 0)


@pytest.mark.pure
def test_calls_go_through_a_request() -> None:
    calls = HostCalls(library=Path("/a/b.so"), targets={"recv": 1})
    assert HostCalls.from_request(calls.to_request()) == calls
    assert HostCalls.from_request({}) == HostCalls()


@pytest.mark.pure
def test_work_of_the_host_is_counted_where_it_starts() -> None:
    on_host, result = one_field(79, b"host"), one_field(3, shape(4))
    body = computation(
        1,
        3,
        instruction("copy", "copy-start", 1, result),
        instruction("call", "async-start", 2, result, on_host),
        instruction("done", "async-done", 3, result),
        instruction("other", "async-start", 4, result, one_field(79, b"sparsecore")),
    )
    assert num_host_calls(module(body)) == 1
    assert num_host_calls(b"") == 0


class Lowered(NamedTuple):
    """What a program is for other devices, and what it calls."""

    hlo: bytes
    targets: dict[str, int]
    text_here: str


def lowered_messages(has_wide_route: bool) -> Lowered:
    """Lower a program that receives, computes and sends, resharded, with its marks."""
    xla_compat.enable_spmd()
    transport = join("in_graph").transport
    layouts = [
        ShardLayout.of_sharding((256, 512), dtype, ROWS)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    there = [ShardLayout.of_sharding((256, 512), x.dtype, COLUMNS) for x in layouts]
    far = [layout.tiling for layout in there]
    sent = transport.in_program.send_route(NAME, 0, layouts, far)
    received = transport.in_program.receive_route(NAME, 0, layouts)
    if has_wide_route:
        received = xla_compat.replicate(torch.zeros(64, dtype=torch.int64))
    mark = notes.mark("F", 0, 0)
    weight = xla_compat.replicate(torch.zeros(512, 512))
    targets: dict[str, int] = {}

    def note(target: str, op: native.abi.Op) -> None:
        targets[target] = abi.OPS.index(op)

    def traced() -> list[torch.Tensor]:
        begin = notes.begin_op(mark)
        (x, y), token = receive_op(received, layouts)
        token = token + send_op(sent, [torch.tanh(x @ weight) + y, y], layouts)
        done = [(token + begin, xla_compat.replicated_sharding())]
        return [notes.end_op(mark, done)]

    text = xla_compat.hlo_text(traced())
    with (
        mock.patch.object(loader, "register_target", note),
        mock.patch.object(native, "register_target", note),
        xla_compat.lowering_for("TPU"),
    ):
        hlo = xla_compat.hlo_module(traced())
    dist.destroy_process_group()
    return Lowered(hlo, targets, text)


def compiled(lowered: Lowered, folder: Path, *, knows: bool = True) -> CompiledProgram:
    compiler = AcceleratorCompiler(Slice.parse("v5e:2x2"), cache=folder)
    targets = lowered.targets if knows else {}
    calls = HostCalls(library=native.library_path(), targets=targets)
    return compiler.compile(lowered.hlo, host_calls=calls)


def is_there() -> bool:
    try:
        CompilerLibrary.find()
    except PipelineError:
        return False
    return True


@pytest.mark.worlds
def test_only_calls_for_tpus_are_marked_as_the_hosts(worlds: Worlds) -> None:
    (found,) = worlds.run(lowered_messages, ranks=1, devices=4, args=(False,))
    assert len(found.targets) == 4
    assert "_xla_compute_type" not in found.text_here
    assert found.hlo.count(b"_xla_compute_type") >= 4


@pytest.mark.worlds
@pytest.mark.skipif(not is_there(), reason="libtpu is not installed")
def test_messages_inside_programs_compile_for_tpus_with_the_real_handlers(
    worlds: Worlds, tmp_path: Path
) -> None:
    (found,) = worlds.run(lowered_messages, ranks=1, devices=4, args=(False,))
    program = compiled(found, tmp_path)
    assert program.error == ""
    # The receive, the send with the mark of the beginning, and the mark of the end.
    assert program.num_host_calls == 3
    unknown = compiled(found, tmp_path, knows=False)
    # Versions without an extension for handlers take any call of the host.
    assert unknown.error == "" or "No FFI handler registered" in unknown.error
    (wide,) = worlds.run(lowered_messages, ranks=1, devices=4, args=(True,))
    assert re.search(r"X\{?64", compiled(wide, tmp_path).error)
