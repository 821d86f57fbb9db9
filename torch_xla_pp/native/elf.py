"""Find local functions of a shared library through its ELF symbol table.

For functions that a library has but does not export. Source: System V ABI, "Object
Files" (ELF-64), https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html.
Reads 64-bit little-endian files. The file is mapped, so only the parts in use are
loaded; finding one among 500,000 symbols takes about a tenth of a second, once.
"""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

_ELF64_LITTLE = b"\x7fELF\x02\x01"
_SYMTAB = 2
_NOTE = 7
_BUILD_ID = 3
_FUNCTION = 2
_SYMBOL = np.dtype(
    [
        ("name", "<u4"),
        ("info", "u1"),
        ("other", "u1"),
        ("section", "<u2"),
        ("value", "<u8"),
        ("size", "<u8"),
    ]
)


class _Section(NamedTuple):
    kind: int
    offset: int
    size: int
    link: int


class ElfFile:
    """The symbols of one library.

    Args:
        path: The library.

    Raises:
        ValueError: It is not a 64-bit little-endian ELF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._data[: len(_ELF64_LITTLE)] != _ELF64_LITTLE:
            raise ValueError(f"{path}: expected a 64-bit little-endian ELF file.")

    def build_id(self) -> str:
        """Return the id of this build of the library; empty if it has none."""
        for section in self._sections():
            if section.kind != _NOTE:
                continue
            at = section.offset
            name_size, size, kind = struct.unpack_from("<III", self._data, at)
            if kind == _BUILD_ID:
                start = at + 12 + -(-name_size // 4) * 4
                return self._data[start : start + size].hex()
        return ""

    def function_address(self, name: str) -> int:
        """Return the address of a function, relative to the library's base.

        Raises:
            LookupError: The library has no symbol table, or not exactly one function
                of this name.
        """
        sections = list(self._sections())
        tables = [section for section in sections if section.kind == _SYMTAB]
        if not tables:
            raise LookupError(f"{self.path.name} has no symbol table (it is stripped)")
        found = {
            int(address)
            for table in tables
            for address in self._addresses(table, sections[table.link], name)
        }
        if len(found) != 1:
            raise LookupError(
                f"{self.path.name}: expected one function {name}, got {len(found)}"
            )
        return found.pop()

    def _sections(self) -> Iterator[_Section]:
        (start,) = struct.unpack_from("<Q", self._data, 0x28)
        size, count = struct.unpack_from("<HH", self._data, 0x3A)
        for at in range(start, start + size * count, size):
            _, kind, _, _, offset, length, link = struct.unpack_from(
                "<IIQQQQI", self._data, at
            )
            yield _Section(kind, offset, length, link)

    def _addresses(self, table: _Section, texts: _Section, name: str) -> list[int]:
        symbols = np.frombuffer(
            self._data, _SYMBOL, table.size // _SYMBOL.itemsize, table.offset
        )
        names = list(self._occurrences(texts, name.encode() + b"\0"))
        is_ours = np.isin(symbols["name"], names) & (symbols["section"] != 0)
        is_ours &= (symbols["info"] & 0xF) == _FUNCTION
        return list(symbols["value"][is_ours])

    def _occurrences(self, texts: _Section, name: bytes) -> Iterator[int]:
        """Find a text in a string table, where names may share suffixes."""
        at = self._data.find(name, texts.offset, texts.offset + texts.size)
        while at >= 0:
            yield at - texts.offset
            at = self._data.find(name, at + 1, texts.offset + texts.size)


def base_address(path: Path) -> int:
    """Return the address at which this process has loaded a library.

    Raises:
        LookupError: It is not loaded, or the system does not say.
    """
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        addresses, _, offset, _, _, *file = line.split(maxsplit=5)
        if file and file[0] == str(path) and int(offset, 16) == 0:
            return int(addresses.split("-")[0], 16)
    raise LookupError(f"{path} is not loaded")
