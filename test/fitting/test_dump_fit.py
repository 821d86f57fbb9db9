"""Programs that a run has dumped are compiled, each once."""

from pathlib import Path

import pytest
from accelerators.written_hlo import square

from torch_xla_pp.accelerators import (
    AcceleratorCompiler,
    CompiledProgram,
    CompilerLibrary,
    DeviceCollective,
    ProgramBytes,
    Slice,
)
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.fitting import DumpFit, fit_dump
from torch_xla_pp.protobuf import messages, one_field

pytestmark = pytest.mark.xla

TOPOLOGY = "v5e:2x2"


class Compiler:
    """One that refuses what is larger than a limit."""

    library = CompilerLibrary(path=Path("none"), version="0")

    def __init__(self, limit: int) -> None:
        self.asked: list[bytes] = []
        self.limit = limit

    def compile(self, hlo: bytes) -> CompiledProgram:
        self.asked.append(hlo)
        if len(hlo) > self.limit:
            return CompiledProgram(error="Custom emitter not found")
        exchange = DeviceCollective(
            kind="all-gather", groups=(), num_bytes=8, is_asynchronous=False
        )
        none = ProgramBytes(arguments=0, outputs=0, aliased=0, temporaries=0, code=0)
        return CompiledProgram(num_bytes=none, collectives=(exchange,))


def write(folder: Path, name: str, module: bytes) -> None:
    path = folder / f"{name}.before_optimizations.hlo.pb"
    path.write_bytes(one_field(1, module))


def test_equal_programs_are_compiled_once_whatever_their_names(tmp_path: Path) -> None:
    write(tmp_path, "module_0000.a", square())
    write(tmp_path, "module_0001.b", square() + one_field(1, b"other"))
    write(tmp_path, "module_0002.c", square(640))
    (tmp_path / "module_0000.a.cpu_after_optimizations.hlo.pb").write_bytes(b"x")
    compiler = Compiler(limit=10**6)
    found = fit_dump(tmp_path, topology=TOPOLOGY, compiler=compiler)  # type: ignore[arg-type]
    names = [program.name for program in found.programs]
    assert names == ["module_0000.a x 2", "module_0002.c"]
    assert [messages(module, 1)[0] for module in compiler.asked] == [b"program"] * 2
    assert found.compiles and "2 of 2 programs compile" in str(found)
    assert DumpFit.from_json(found.to_json()) == found


def test_calls_of_the_cpu_are_explained(tmp_path: Path) -> None:
    write(tmp_path, "a", square())
    found = fit_dump(tmp_path, topology=TOPOLOGY, compiler=Compiler(limit=0))  # type: ignore[arg-type]
    assert not found.compiles
    assert "a: DOES NOT COMPILE\n  Custom emitter not found" in str(found)
    assert "TORCH_XLA_PP_TRANSPORT=host and TORCH_XLA_PP_PRODUCTS=xla" in str(found)


def test_a_folder_without_programs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got none\. Run with XLA_FLAGS="):
        fit_dump(tmp_path, topology=TOPOLOGY, compiler=Compiler(0))  # type: ignore[arg-type]


def has_library() -> bool:
    try:
        CompilerLibrary.find()
    except PipelineError:
        return False
    return True


@pytest.mark.skipif(not has_library(), reason="libtpu is not installed")
def test_a_dumped_program_is_compiled_for_a_tpu(tmp_path: Path) -> None:
    write(tmp_path, "a", square())
    compiler = AcceleratorCompiler(Slice.parse(TOPOLOGY), cache=tmp_path / "cache")
    found = fit_dump(tmp_path, topology=TOPOLOGY, mesh={"x": 4}, compiler=compiler)
    (program,) = found.programs
    (gather,) = program.collectives
    assert (gather.kind, gather.axes) == ("all-gather", ("x",))
