"""The engine of one group's messages, see `csrc/engine.h` and `csrc/inbox.h`."""

import ctypes
from typing import Any, NamedTuple

from torch_xla_pp.native import loader
from torch_xla_pp.native.abi import STATS_FIELDS, FailureKind

_MAX_ADDRESS_BYTES = 1 << 16
_MAX_TEXT_BYTES = 1 << 16


class Failure(NamedTuple):
    """The reason why a generation has failed.

    Attributes:
        text: What happened, or the report of a peer.
        is_timeout: Whether a message did not come in time.
        is_report: Whether a peer reported its own failure.
        num_ended: How many steps of the generation the rank had ended that failed.
    """

    text: str
    is_timeout: bool
    is_report: bool
    num_ended: int


class Stats(NamedTuple):
    """The counters of an engine.

    Attributes:
        held_bytes: Bytes of messages that no receive has taken yet.
        num_messages: Number of these messages, one per device of a sender.
        num_waiting: Receive ops that wait, one per device.
    """

    held_bytes: int
    num_messages: int
    num_waiting: int


class Engine:
    """One group's messages, in C++.

    Args:
        rank: Rank in the group.
        num_devices: Number of local devices.
        timeout_s: How long a receive waits, in seconds.
        token: Secret of the members of the job, 16 bytes.
        host: Host that the network interface must lead to; empty for any.

    Raises:
        Unavailable: UCX cannot open an endpoint on this host.
    """

    def __init__(
        self, rank: int, num_devices: int, timeout_s: float, token: bytes, host: str
    ) -> None:
        self._library = loader.library()
        error = ctypes.create_string_buffer(_MAX_TEXT_BYTES)
        self.id: int = self._library.xpp_open(
            rank, num_devices, timeout_s, token, host.encode(), error, len(error)
        )
        if not self.id:
            raise loader.Unavailable(f"UCX: {error.value.decode()}")
        self._text = ctypes.create_string_buffer(_MAX_TEXT_BYTES)
        self._size, self._num_ended = ctypes.c_int64(), ctypes.c_uint64()

    def address(self) -> bytes:
        """Return the address that peers connect to."""
        out = ctypes.create_string_buffer(_MAX_ADDRESS_BYTES)
        size = self._library.xpp_address(self.id, out, len(out))
        return out.raw[:size]

    def connect(self, peer: int, address: bytes, pid: int) -> None:
        """Connect to a peer, once; returns immediately.

        Args:
            peer: Rank in the group.
            address: The result of its `address`.
            pid: Its process, 0 if that is not on this host.
        """
        self._library.xpp_connect(self.id, peer, address, len(address), pid)

    def expect(self, peer: int, direction: int, stage: int, origin: int) -> None:
        """Allow messages of one edge."""
        self._library.xpp_expect(self.id, peer, direction, stage, origin)

    def report(self, generation: int, report: str, num_ended: int = 0) -> None:
        """Fail a generation and report it to the peers, which forward it.

        An engine that has ended fewer than `num_ended` steps holds it until it has.
        """
        self._library.xpp_report(self.id, generation, report.encode(), num_ended)

    def end_step(self, generation: int, num_ended: int, num_sent: int) -> None:
        """Note that a step has ended.

        Args:
            generation: The generation of the step.
            num_ended: Steps of it that have ended.
            num_sent: Messages that these send, from each device.
        """
        self._library.xpp_end_step(self.id, generation, num_ended, num_sent)

    def advance(self, generation: int) -> None:
        """Forget older generations."""
        self._library.xpp_advance(self.id, generation)

    def failure(self, generation: int) -> Failure | None:
        """Return why a generation has failed, None if it has not."""
        kind = self._library.xpp_failure(
            self.id,
            generation,
            self._text,
            _MAX_TEXT_BYTES,
            self._size,
            self._num_ended,
        )
        if not kind:
            return None
        text = self._text.raw[: self._size.value].decode(errors="replace")
        is_timeout, is_report = kind == FailureKind.TIMEOUT, kind == FailureKind.REPORT
        return Failure(text, is_timeout, is_report, self._num_ended.value)

    def settle(self, generation: int, count: int, limit_s: float) -> bool:
        """Wait until `count` receives have succeeded, or for `limit_s`."""
        settled = self._library.xpp_settle(self.id, generation, count, limit_s)
        return bool(settled)

    def take_notices(self) -> list[str]:
        """Return the messages to be logged, and forget them."""
        size = self._library.xpp_take_notices(self.id, self._text, _MAX_TEXT_BYTES)
        return self._text.raw[:size].decode(errors="replace").splitlines()

    def stats(self) -> Stats:
        """Return the counters."""
        out: Any = (ctypes.c_int64 * len(STATS_FIELDS))()
        self._library.xpp_stats(self.id, out)
        return Stats(**dict(zip(STATS_FIELDS, out, strict=True)))

    def delay(self, time_s: float, device: int = -1) -> None:
        """Delay messages that arrive, as a slow network would.

        Args:
            time_s: For how long, in seconds.
            device: Only those from this device of a sender; -1 for all.
        """
        self._library.xpp_delay(self.id, device, time_s)

    def close(self, timeout_s: float) -> bool:
        """Disconnect from the peers; return whether everything sent has arrived."""
        return bool(self._library.xpp_close(self.id, timeout_s))
