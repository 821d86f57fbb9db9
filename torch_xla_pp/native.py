"""The compiled library (`csrc/`): handlers of custom calls, engine of the transport.

A thin typed layer: what the calls mean is said in `csrc/engine.h`, `csrc/inbox.h` and
`csrc/products.h`. Every call lets other Python threads run.
"""

import ctypes
import functools
import importlib.machinery
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from torch_xla_pp import xla_compat

Op = Literal["send", "receive", "begin", "end", "product"]

_OPS: tuple[Op, ...] = get_args(Op)  # as in csrc/registry.h
_MAX_ADDRESS_BYTES = 1 << 16
_MAX_TEXT_BYTES = 1 << 16
_TIMEOUT, _REPORT = 2, 3  # as in csrc/inbox.h


class Unavailable(Exception):
    """Say why the compiled transport cannot be used here."""


class Failure(NamedTuple):
    """Tell why a generation has failed.

    Attributes:
        text: What happened, or the report of a peer.
        is_timeout: Whether a message did not come in time.
        is_report: Whether a peer told of its own failure.
    """

    text: str
    is_timeout: bool
    is_report: bool


class Stats(NamedTuple):
    """Count what an engine holds.

    Attributes:
        held_bytes: Bytes of messages that no receive has taken yet.
        num_messages: Number of these messages, one per device of a sender.
        num_waiting: Receive ops that wait, one per device.
    """

    held_bytes: int
    num_messages: int
    num_waiting: int


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library, loaded and checked against torch_xla's XLA.

    Raises:
        Unavailable: It was not built, or something that it needs is not there.
    """
    path = Path(__file__).parent / (
        "_native" + importlib.machinery.EXTENSION_SUFFIXES[0]
    )
    if not path.exists():
        raise Unavailable(
            "the compiled part of torch_xla_pp was not built (it needs a C++17 "
            "compiler when the package is installed)"
        )
    # Handlers for crashes belong to the program, not to UCX, which reads this on load.
    os.environ.setdefault("UCX_ERROR_SIGNALS", "")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        import libucx

        libucx.load_library()
        loaded = ctypes.CDLL(str(path))
    except (ImportError, OSError) as error:
        raise Unavailable(f"UCX cannot be loaded: {error}") from error
    _declare(loaded)
    register(loaded, "torch_xla_pp.probe", "send")
    return loaded


def _declare(loaded: ctypes.CDLL) -> None:
    """Give the C functions their types; see `csrc/api.cc`."""
    i32, i64, u64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
    text, pointer, f64 = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_double
    for name, result, arguments in (
        ("register", i64, (pointer, text, i32, text, i64)),
        ("use_blas", None, (pointer, pointer)),
        ("start_recording", None, ()),
        ("stop_recording", i64, (ctypes.POINTER(i64), i64)),
        ("open", i64, (i32, i32, f64, text, text, text, i64)),
        ("address", i64, (i64, text, i64)),
        ("connect", None, (i64, i32, text, i64, i32)),
        ("expect", None, (i64, i32, i32, i32, i32)),
        ("report", None, (i64, u64, text)),
        ("advance", None, (i64, u64)),
        ("failure", i32, (i64, u64, text, i64, ctypes.POINTER(i64))),
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
        get_api = xla_compat.ffi_api_address()
    except (LookupError, ValueError, OSError) as error:
        raise Unavailable(f"XLA's FFI cannot be reached: {error}") from error
    out = ctypes.create_string_buffer(_MAX_TEXT_BYTES)
    size = loaded.xpp_register(get_api, target.encode(), _OPS.index(op), out, len(out))
    if size:
        raise Unavailable(out.raw[:size].decode())


@functools.cache
def register_target(target: str, op: Op) -> None:
    """Do what `register` does, once for each target."""
    register(library(), target, op)


class Engine:
    """One group's messages, in C++.

    Args:
        rank: Rank in the group.
        num_devices: Number of local devices.
        timeout_s: How long a receive waits, in seconds.
        token: What all members of the job know, 16 bytes.
        host: Host that the network interface must lead to; empty for any.

    Raises:
        Unavailable: UCX cannot open an endpoint on this host.
    """

    def __init__(
        self, rank: int, num_devices: int, timeout_s: float, token: bytes, host: str
    ) -> None:
        self._library = library()
        error = ctypes.create_string_buffer(_MAX_TEXT_BYTES)
        self.id: int = self._library.xpp_open(
            rank, num_devices, timeout_s, token, host.encode(), error, len(error)
        )
        if not self.id:
            raise Unavailable(f"UCX: {error.value.decode()}")
        self._text = ctypes.create_string_buffer(_MAX_TEXT_BYTES)
        self._size = ctypes.c_int64()

    def address(self) -> bytes:
        """Return what peers connect to."""
        out = ctypes.create_string_buffer(_MAX_ADDRESS_BYTES)
        size = self._library.xpp_address(self.id, out, len(out))
        return out.raw[:size]

    def connect(self, peer: int, address: bytes, pid: int) -> None:
        """Connect to a peer; done once, returns at once.

        Args:
            peer: Rank in the group.
            address: What its `address` returned.
            pid: Its process, 0 if that is not on this host.
        """
        self._library.xpp_connect(self.id, peer, address, len(address), pid)

    def expect(self, peer: int, direction: int, stage: int, origin: int) -> None:
        """Allow messages of one edge."""
        self._library.xpp_expect(self.id, peer, direction, stage, origin)

    def report(self, generation: int, report: str) -> None:
        """Fail a generation and tell the peers, who pass it on."""
        self._library.xpp_report(self.id, generation, report.encode())

    def advance(self, generation: int) -> None:
        """Forget older generations."""
        self._library.xpp_advance(self.id, generation)

    def failure(self, generation: int) -> Failure | None:
        """Return why a generation has failed, None if it has not."""
        kind = self._library.xpp_failure(
            self.id, generation, self._text, _MAX_TEXT_BYTES, self._size
        )
        if not kind:
            return None
        text = self._text.raw[: self._size.value].decode(errors="replace")
        return Failure(text, kind == _TIMEOUT, kind == _REPORT)

    def settle(self, generation: int, count: int, limit_s: float) -> bool:
        """Wait until `count` receives have ended well, or for `limit_s`."""
        settled = self._library.xpp_settle(self.id, generation, count, limit_s)
        return bool(settled)

    def take_notices(self) -> list[str]:
        """Return what deserves a log entry, and forget it."""
        size = self._library.xpp_take_notices(self.id, self._text, _MAX_TEXT_BYTES)
        return self._text.raw[:size].decode(errors="replace").splitlines()

    def stats(self) -> Stats:
        """Count what is held."""
        out: Any = (ctypes.c_int64 * 3)()
        self._library.xpp_stats(self.id, out)
        return Stats(*out)

    def delay(self, time_s: float, device: int = -1) -> None:
        """Hold messages that arrive back, as a slow network would.

        Args:
            time_s: For how long, in seconds.
            device: Only those from this device of a sender; -1 for all.
        """
        self._library.xpp_delay(self.id, device, time_s)

    def close(self, timeout_s: float) -> bool:
        """Part from the peers; return whether everything sent has arrived."""
        return bool(self._library.xpp_close(self.id, timeout_s))
