"""Loads the compiled library (`csrc/`) and lets XLA call it.

A thin typed layer: `csrc/api.cc` documents the calls. Every call lets other Python
threads run.
"""

import ctypes
import functools
import importlib.machinery
import os
from pathlib import Path

from torch_xla_pp.native.abi import OPS, Op, faults_of
from torch_xla_pp.native.ffi_api import ffi_api_address

_MAX_TEXT_BYTES = 1 << 16


class Unavailable(Exception):
    """The compiled transport cannot be used here, for the reason given."""


def library_path() -> Path:
    """Return the path of the library, whether it was built or not."""
    name = "_native" + importlib.machinery.EXTENSION_SUFFIXES[0]
    return Path(__file__).parent.parent / name


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library, loaded and checked against torch_xla's XLA.

    Raises:
        Unavailable: It was not built, or something that it needs is not there.
    """
    path = library_path()
    if not path.exists():
        raise Unavailable(
            "the compiled part of torch_xla_pp was not built (it needs a C++17 "
            "compiler when the package is installed)"
        )
    # UCX reads this on load, and is to leave handlers for crashes to the program.
    os.environ.setdefault("UCX_ERROR_SIGNALS", "")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        import libucx

        libucx.load_library()
        loaded = ctypes.CDLL(str(path))
    except (ImportError, OSError) as error:
        raise Unavailable(f"UCX cannot be loaded: {error}") from error
    _check(loaded)
    _declare(loaded)
    register(loaded, "torch_xla_pp.probe", "send")
    return loaded


def _check(loaded: ctypes.CDLL) -> None:
    """Refuse a library that was built from other sources than this package."""
    faults = ["it does not say what it is"]
    if hasattr(loaded, "xpp_abi"):
        loaded.xpp_abi.restype = ctypes.c_char_p
        faults = faults_of(loaded.xpp_abi().decode())
    if faults:
        raise Unavailable(
            "the compiled part of torch_xla_pp does not fit the rest: "
            f"{'; '.join(faults)}. Install the package again, which builds it"
        )


def _declare(loaded: ctypes.CDLL) -> None:
    """Declare the types of the C functions; see `csrc/api.cc`."""
    i32, i64, u64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
    text, pointer, f64 = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_double
    for name, result, arguments in (
        ("register", i64, (pointer, text, i32, text, i64)),
        ("use_blas", None, (pointer, pointer)),
        ("use_cores", None, (i64,)),
        ("keep_blocks", i32, (u64, i64, i64)),
        ("begin_step_of_blocks", None, ()),
        ("drop_blocks", None, ()),
        ("waiting_bytes", i64, ()),
        ("start_recording", None, ()),
        ("stop_recording", i64, (ctypes.POINTER(i64), i64)),
        ("open", i64, (i32, i32, f64, text, text, text, i64)),
        ("address", i64, (i64, text, i64)),
        ("connect", None, (i64, i32, text, i64, i32)),
        ("expect", None, (i64, i32, i32, i32, i32)),
        ("report", None, (i64, u64, text, u64)),
        ("end_step", None, (i64, u64, u64, u64)),
        ("advance", None, (i64, u64)),
        (
            "failure",
            i32,
            (i64, u64, text, i64, ctypes.POINTER(i64), ctypes.POINTER(u64)),
        ),
        ("settle", i32, (i64, u64, u64, f64)),
        ("take_notices", i64, (i64, text, i64)),
        ("stats", None, (i64, ctypes.POINTER(i64))),
        ("delay", None, (i64, i32, f64)),
        ("close", i32, (i64, f64)),
    ):
        function = getattr(loaded, f"xpp_{name}")
        function.restype, function.argtypes = result, list(arguments)


def register(loaded: ctypes.CDLL, target: str, op: Op) -> None:
    """Let XLA call the handler of `op` for `target`.

    Raises:
        Unavailable: torch_xla's XLA cannot be reached or refuses.
    """
    try:
        get_api = ffi_api_address()
    except (LookupError, ValueError, OSError) as error:
        raise Unavailable(f"XLA's FFI cannot be reached: {error}") from error
    out = ctypes.create_string_buffer(_MAX_TEXT_BYTES)
    size = loaded.xpp_register(get_api, target.encode(), OPS.index(op), out, len(out))
    if size:
        raise Unavailable(out.raw[:size].decode())


@functools.cache
def register_target(target: str, op: Op) -> None:
    """Call `register`, once for each target."""
    register(library(), target, op)
