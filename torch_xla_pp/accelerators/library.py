"""Find a compiler's library, which the user installs."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from torch_xla_pp import env
from torch_xla_pp.errors import PipelineError

_MODULE, _FILE = "libtpu", "libtpu.so"
_HOW_TO_GET = (
    "Install it beside this package: pip install libtpu (Linux, x86-64; read its "
    "licence), or set TPU_LIBRARY_PATH to a libtpu.so"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilerLibrary:
    """A library that compiles for TPUs.

    Args:
        path: Where it is.
        version: Of its wheel; of a file of another origin, its size.
    """

    path: Path
    version: str

    @classmethod
    def find(cls) -> "CompilerLibrary":
        """Return that of `TPU_LIBRARY_PATH`, else that of the package `libtpu`.

        Raises:
            PipelineError: There is none; the message says how to get it.
        """
        given = env.tpu_library()
        if given is not None:
            if not given.is_file():
                raise PipelineError(
                    f"TPU_LIBRARY_PATH: expected a libtpu.so, got {given}, which is no "
                    f"file. {_HOW_TO_GET}."
                )
            return cls(path=given, version=_version_of(given))
        found = importlib.util.find_spec(_MODULE)
        for folder in (found and found.submodule_search_locations) or ():
            path = Path(folder) / _FILE
            if path.is_file():
                return cls(path=path, version=_version_of(path))
        raise PipelineError(
            f"compiling for TPUs: expected the package libtpu, found none. "
            f"{_HOW_TO_GET}."
        )


def _version_of(path: Path) -> str:
    """Return the version of the wheel that a library was installed from."""
    wheels = sorted(path.parent.parent.glob(f"{_MODULE}-*.dist-info"))
    if len(wheels) == 1:
        return wheels[0].stem.removeprefix(f"{_MODULE}-")
    return f"of {path.stat().st_size} bytes"
