"""Symbols that a library does not export are found in its symbol table."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from torch_xla_pp.native.elf import ElfFile, base_address

pytestmark = pytest.mark.pure

SOURCE = """
static int __attribute__((noinline, used)) hidden_answer(void) { return 42; }
int the_hidden_answer(void) { return hidden_answer() + 1; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("elf")
    (folder / "answer.c").write_text(SOURCE)
    path = folder / "answer.so"
    command = [compiler, "-shared", "-fPIC", "-Wl,--build-id", "-o", str(path)]
    subprocess.run([*command, str(folder / "answer.c")], check=True, timeout=60)
    return path


def test_a_local_function_can_be_found_and_called(library: Path) -> None:
    loaded = ctypes.CDLL(str(library))
    assert not hasattr(loaded, "hidden_answer")
    # The name is also the end of another one; linkers let them share a text.
    address = base_address(library) + ElfFile(library).function_address("hidden_answer")
    assert ctypes.CFUNCTYPE(ctypes.c_int)(address)() == 42


def test_builds_are_told_apart(library: Path) -> None:
    assert len(ElfFile(library).build_id()) == 40


def test_what_cannot_be_found_is_said(library: Path, tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="expected one function no_answer, got 0"):
        ElfFile(library).function_address("no_answer")
    stripped = tmp_path / "stripped.so"
    if shutil.which("strip"):
        subprocess.run(["strip", "-o", stripped, library], check=True, timeout=60)
        with pytest.raises(LookupError, match="has no symbol table"):
            ElfFile(stripped).function_address("hidden_answer")
    with pytest.raises(LookupError, match="is not loaded"):
        base_address(tmp_path / "other.so")
    text = tmp_path / "text.so"
    text.write_text("no library")
    with pytest.raises(ValueError, match="expected a 64-bit little-endian ELF file"):
        ElfFile(text)
