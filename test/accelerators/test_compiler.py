"""Programs are compiled for devices that are not here."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from accelerators.written_hlo import square

from torch_xla_pp.accelerators import (
    AcceleratorCompiler,
    CompiledProgram,
    CompilerLibrary,
    ProgramBytes,
    Slice,
)
from torch_xla_pp.errors import PipelineError

TOPOLOGY = Slice.parse("v5e:2x2")


def is_there() -> bool:
    try:
        CompilerLibrary.find()
    except PipelineError:
        return False
    return True


needs_library = pytest.mark.skipif(not is_there(), reason="libtpu is not installed")


@pytest.fixture
def compiler(tmp_path: Path) -> AcceleratorCompiler:
    return AcceleratorCompiler(TOPOLOGY, cache=tmp_path / "cache")


@pytest.fixture
def broken(tmp_path: Path) -> CompilerLibrary:
    """Return a library that is none."""
    path = tmp_path / "libtpu.so"
    path.write_text("no library")
    return CompilerLibrary(path=path, version="1")


@pytest.mark.pure
def test_a_library_is_found_where_the_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "libtpu"
    folder.mkdir()
    path = folder / "libtpu.so"
    path.write_bytes(b"12345")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(path))
    assert CompilerLibrary.find() == CompilerLibrary(path=path, version="of 5 bytes")
    (tmp_path / "libtpu-0.0.21.dist-info").mkdir()
    assert CompilerLibrary.find().version == "0.0.21"


@pytest.mark.pure
def test_a_missing_library_is_told_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "none.so"))
    with pytest.raises(PipelineError, match=r"none.so, which is no file. Install it"):
        CompilerLibrary.find()
    monkeypatch.delenv("TPU_LIBRARY_PATH")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    with pytest.raises(PipelineError, match="expected the package libtpu, found none"):
        CompilerLibrary.find()


@pytest.mark.pure
def test_an_answer_is_an_error_or_bytes() -> None:
    num_bytes = ProgramBytes(arguments=8, outputs=6, aliased=4, temporaries=2, code=1)
    assert num_bytes.extra == 4
    found = CompiledProgram(num_bytes=num_bytes, output_shardings=("{replicated}",))
    assert CompiledProgram.from_json(found.to_json()) == found
    with pytest.raises(ValueError, match="expected an error or the bytes"):
        CompiledProgram()
    with pytest.raises(ValueError, match="got both"):
        CompiledProgram(error="x", num_bytes=num_bytes)


@pytest.mark.pure
def test_the_death_of_a_compiler_is_an_answer_that_is_not_kept(
    broken: CompilerLibrary, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    compiler = AcceleratorCompiler(TOPOLOGY, library=broken, cache=cache)
    found = compiler.compile(square())
    assert "the compiler's process ended with code 1" in found.error
    assert "libtpu.so" in found.error
    assert not list(cache.glob("*"))


@pytest.mark.pure
def test_an_answer_is_asked_for_once(broken: CompilerLibrary, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    compiler = AcceleratorCompiler(TOPOLOGY, library=broken, cache=cache)
    known = CompiledProgram(error="known")
    path = cache / f"{compiler._digest(square())}.json"
    cache.mkdir()
    known.to_json(path)
    assert compiler.compile(square()) == known
    digests = {
        compiler._digest(square()),
        compiler._digest(square(128)),
        AcceleratorCompiler(Slice.parse("v6e:2x2"), library=broken)._digest(square()),
        AcceleratorCompiler(
            TOPOLOGY, library=CompilerLibrary(path=broken.path, version="2")
        )._digest(square()),
    }
    assert len(digests) == 4
    path.write_text("half a record")
    assert compiler.compile(square()) != known


@needs_library
@pytest.mark.xla
def test_a_program_is_compiled_with_its_bytes_and_exchanges(
    compiler: AcceleratorCompiler, tmp_path: Path
) -> None:
    found = compiler.compile(square())
    assert found.error == ""
    assert found.num_bytes is not None
    # A device has 16 of 64 rows, and makes all of them.
    assert found.num_bytes.arguments == 16 * 128 * 4
    assert found.num_bytes.outputs == 64 * 128 * 4
    assert dict(found.kinds) == {"all-gather": 1}
    assert sorted(found.collectives[0].groups[0]) == [0, 1, 2, 3]
    assert found.output_shardings == ("{replicated}",)
    kept = list((tmp_path / "cache").glob("*.json"))
    assert [CompiledProgram.from_json(path) for path in kept] == [found]


@needs_library
@pytest.mark.xla
def test_what_does_not_compile_has_the_compilers_own_words(
    compiler: AcceleratorCompiler,
) -> None:
    assert "HloModuleProto" in compiler.compile(b"no module").error
    found = compiler.compile(square(2**28))
    assert "memory" in found.error and found.num_bytes is None


@needs_library
@pytest.mark.xla
def test_several_programs_are_compiled_at_once(compiler: AcceleratorCompiler) -> None:
    modules = [square(64 * count) for count in range(1, 5)]
    with ThreadPoolExecutor(len(modules)) as pool:
        found = list(pool.map(compiler.compile, modules))
    assert [program.error for program in found] == [""] * 4


@needs_library
@pytest.mark.xla
@pytest.mark.parametrize("name", ["v5e:1x1", "v5p:2x1x1", "v4:2x2x1", "v6e:4x4"])
def test_the_compiler_knows_every_slice_by_our_name(name: str, tmp_path: Path) -> None:
    topology = Slice.parse(name)
    found = AcceleratorCompiler(topology, cache=tmp_path).compile(b"no module")
    assert "HloModuleProto" in found.error
