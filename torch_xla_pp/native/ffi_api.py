"""The address of the FFI of torch_xla's XLA, with which handlers are registered.

torch_xla 2.9 does not export it, but its library has a local symbol for it.
"""

import functools
import logging
from pathlib import Path

from torch_xla_pp import env, xla_compat
from torch_xla_pp.native.elf import ElfFile, base_address

_SYMBOL = "_ZN3xla3ffi12GetXlaFfiApiEv"  # xla::ffi::GetXlaFfiApi()

_logger = logging.getLogger(__name__)


@functools.cache
def ffi_api_address() -> int:
    """Return the address of `xla::ffi::GetXlaFfiApi` in torch_xla's own XLA.

    Raises:
        LookupError: It cannot be found, or programs do not run on the CPU client, the
            only one with host handlers.
    """
    kind = env.device_kind()
    if kind != "CPU":
        raise LookupError(f"XLA programs run on {kind}, which calls no host handlers")
    path = xla_compat.library_path()
    return base_address(path) + _offset(path)


def _offset(path: Path) -> int:
    """Return the offset in the library, which is cached on disk by its build id."""
    library = ElfFile(path)
    build_id = library.build_id()
    known = env.cache_dir() / f"ffi-api-{build_id}"
    try:
        if build_id and known.exists():
            return int(known.read_text())
    except (OSError, ValueError) as error:
        _logger.debug("%s is not readable: %s", known, error)
    offset = library.function_address(_SYMBOL)
    try:
        if build_id:
            known.parent.mkdir(parents=True, exist_ok=True)
            known.write_text(str(offset))
    except OSError as error:
        _logger.debug("%s is not writable: %s", known, error)
    return offset
