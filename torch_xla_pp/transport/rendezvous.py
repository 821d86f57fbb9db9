"""What the ranks of a group tell each other aside from tensors, over c10d's store.

Terms: a *report* says that a rank has failed. A *generation* is the time between two
failures of the job; its number is the number of failures that a rank has seen. Every
rank leaves a generation in the same way, by raising once: its own error or the first
one reported. What belongs to an older generation (rounds, messages) is void, hence a
step after a failed one never meets leftovers of it.

A report goes to the store and through every *channel* that has joined: the store ends
with its process, perhaps before a peer has looked, and asking it takes a round trip.

Not for large or frequent data: every call is a round trip to the store.
"""

import builtins
import logging
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch_xla_pp import errors
from torch_xla_pp.errors import PipelineError, TransportError, TransportTimeout
from torch_xla_pp.transport.c10d import PrefixStore, Store

POLL_S = 0.2
_FIRST_NAP_S = 0.001
_LONGEST_NAP_S = 0.05
_REPORT = "xla_pp_report"
_SHARED_BUILTINS = ("ValueError", "TypeError", "RuntimeError")

_logger = logging.getLogger(__name__)


class Channel(Protocol):
    """Tell peers of failures in another way than by the store; never wait for them."""

    def report(self, generation: int, report: str) -> None:
        """Give the peers the report that ends a generation."""

    def end(self, generation: int) -> None:
        """Forget a generation that this rank has left."""


class StoreLost(TransportError):
    """Report that the process with the job's store has ended."""


class Rendezvous:
    """Let the ranks of a group agree on values and learn of each other's errors.

    Args:
        store: The store of the group; keys of other groups must have other prefixes.
        rank: Rank of this process in the group.
        size: Number of ranks in the group.
        timeout_s: How long to wait for a peer, in seconds, where a call gives no
            other limit.
        job_rank: Rank of this process in the job, by which peers are told of its
            errors; None if that is `rank`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        job_rank: int | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self._job_rank = rank if job_rank is None else job_rank
        self._store = PrefixStore("rendezvous/", store)
        self._generation = 0
        self._rounds: Counter[str] = Counter()
        self._relayed: BaseException | None = None
        self._channels: list[Channel] = []
        self._told: dict[int, str] = {}

    def join(self, channel: Channel) -> None:
        """Send the reports of this rank through `channel`, too.

        A report is a text of at least four lines: the rank, the type of its error, the
        context, and the error's text.
        """
        self._channels.append(channel)

    def tell(self, generation: int, report: str) -> None:
        """Take a peer's report from a channel; any thread may call.

        Of several for one generation the first counts.
        """
        if generation >= self._generation:
            self._told.setdefault(generation, report)

    @property
    def generation(self) -> int:
        """Return how many failures of the job this rank has seen."""
        return self._generation

    def publish(self, name: str, value: Any) -> None:
        """Give `value`, which must pickle, to every rank that reads `name`."""
        self._set(f"value/{name}/{self.rank}", value)

    def read(
        self,
        name: str,
        from_rank: int,
        timeout_s: float | None = None,
        longest_nap_s: float = _LONGEST_NAP_S,
    ) -> Any:
        """Wait for what `from_rank` publishes as `name`, and return it.

        Looks ever less often, but at least every `longest_nap_s` seconds.

        Raises:
            TransportTimeout: It was not published within `timeout_s` seconds.
            Exception: A peer has reported a failure, see `check`.
        """
        key = f"value/{name}/{from_rank}"
        return self._await(key, name, from_rank, timeout_s, longest_nap_s)

    def retract(self, name: str) -> None:
        """Drop what this rank has published as `name`; nobody may still read it."""
        with self._asking():
            self._store.delete_key(f"value/{name}/{self.rank}")

    def exchange(
        self, name: str, value: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Return the `value` of every rank, by rank. All ranks must call.

        Each call with the same name is a new round.

        Raises:
            TransportTimeout: A rank did not call within `timeout_s` seconds.
            Exception: A peer has reported a failure, see `check`.
        """
        number = self._rounds[name]
        self._rounds[name] += 1
        self._set(self._round_key(name, number, self.rank), value)
        values = [
            self._await(self._round_key(name, number, rank), name, rank, timeout_s)
            for rank in range(self.size)
        ]
        # All ranks are in this round, so nobody still reads the one before.
        if number:
            self._store.delete_key(self._round_key(name, number - 1, self.rank))
        return values

    def report(self, error: BaseException, context: str = "") -> None:
        """Tell all ranks that this one fails with `error`.

        Of several reports in one generation the first counts. An error that was
        reported, by this rank or a peer, or was raised because of such a one, is not
        reported again. One that a peer in another group has reported is passed on.

        Args:
            error: What this rank is about to raise.
            context: What the rank was doing, appended to the text of the peers.
        """
        if self._is_relayed(error):
            return
        text = str(error) or type(error).__name__
        context = context.replace("\n", " ")
        own = f"{self._job_rank}\n{_shared_type_name(error)}\n{context}\n{text}"
        report = _reported(error) or own
        for channel in self._channels:
            channel.report(self._generation, report)
        try:
            self._store.compare_set(self._report_key(), "", report)
        except RuntimeError as lost:
            _logger.warning("the store was not told of %r: %s", error, lost)
        self._relayed = error
        self._advance()

    @contextmanager
    def reporting(self, context: str = "") -> Iterator[None]:
        """Report every exception that leaves the block."""
        try:
            yield
        except BaseException as error:
            self.report(error, context)
            raise

    def calm(self) -> bool:
        """Return whether no failure waits to be raised; one call of the store.

        A store that is gone counts as calm: its rank may have done its part and left.
        Whoever still needs something of that rank finds out by missing it.
        """
        if self._generation in self._told:
            return False
        try:
            return not self._has(self._report_key())
        except StoreLost as lost:
            _logger.debug("%s", lost)
            return True

    def check(self) -> None:
        """Raise if any rank has reported a failure, once for each failure.

        Raises:
            Exception: The peer's own type of error where that is ValueError,
                TypeError, RuntimeError or one of `torch_xla_pp.errors` (or a subclass
                of one, as that one), else PipelineError.
        """
        if self.calm():
            return
        report = self._told.get(self._generation)
        if report is None:
            report = self._store.get(self._report_key()).decode()
        rank, kind, context, text = report.split("\n", 3)
        self._advance()
        where = f": {context}" if context else ""
        error = _shared_type(kind)(f"{text} (raised on rank {rank}){where}")
        vars(error)[_REPORT] = report
        self._relayed = error
        raise error

    def wait_until(
        self,
        is_ready: Callable[[float], bool],
        timeout_s: float | None,
        missing: Callable[[], str],
    ) -> None:
        """Wait for `is_ready`, raising as soon as a peer reports a failure.

        Args:
            is_ready: Gets the number of seconds that it may wait, at most `POLL_S`.
            timeout_s: The limit, by default that of the rendezvous.
            missing: Returns the text to put before the hint when time is up.

        Raises:
            TransportTimeout: The limit has passed.
            Exception: A peer has reported a failure, see `check`.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        start_s = time.monotonic()
        while not is_ready(min(POLL_S, max(0.0, start_s + limit_s - time.monotonic()))):
            self.check()
            if time.monotonic() - start_s >= limit_s:
                raise TransportTimeout(
                    f"rank {self.rank} waited {limit_s:g} s for {missing()}. See "
                    f"whether that rank still runs, or set TORCH_XLA_PP_TIMEOUT_S to "
                    f"more seconds."
                )

    def _set(self, key: str, value: Any) -> None:
        with self._asking():
            self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]

    def _has(self, key: str) -> bool:
        with self._asking():
            return self._store.check([key])

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Raise what ended the job, or else StoreLost, when the store is gone."""
        try:
            yield
        except RuntimeError as lost:
            if self._generation in self._told:
                self.check()
            raise StoreLost(
                f"rank {self.rank}: the store of the job is gone: {lost}. It lives in "
                f"torchrun or in rank 0: look there for the first error."
            ) from lost

    def _await(
        self,
        key: str,
        name: str,
        from_rank: int,
        timeout_s: float | None,
        longest_nap_s: float = _LONGEST_NAP_S,
    ) -> Any:
        nap_s = min(_FIRST_NAP_S, longest_nap_s)

        # The store's own wait() logs a warning at each time-out, so look and nap.
        def is_there(limit_s: float) -> bool:
            nonlocal nap_s
            end_s = time.monotonic() + limit_s
            while not self._has(key):
                if time.monotonic() >= end_s:
                    return False
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, longest_nap_s)
            return True

        self.wait_until(is_there, timeout_s, lambda: f"rank {from_rank}: {name!r}")
        with self._asking():
            return pickle.loads(self._store.get(key))

    def _round_key(self, name: str, number: int, rank: int) -> str:
        return f"round/{self._generation}/{name}/{number}/{rank}"

    def _report_key(self) -> str:
        return f"report/{self._generation}"

    def _advance(self) -> None:
        for channel in self._channels:
            channel.end(self._generation)
        self._told.pop(self._generation, None)
        self._generation += 1
        self._rounds.clear()

    def _is_relayed(self, error: BaseException | None) -> bool:
        if error is None or self._relayed is None:
            return False
        return error is self._relayed or self._is_relayed(
            error.__cause__ or error.__context__
        )


def _reported(error: BaseException | None) -> str | None:
    """Return the report of a peer that has led to an error, None if there is none."""
    if error is None:
        return None
    found: str | None = vars(error).get(_REPORT)
    return found or _reported(error.__cause__ or error.__context__)


def _shared_type_name(error: BaseException) -> str:
    for kind in type(error).__mro__:
        if kind.__name__ in _SHARED_BUILTINS or kind.__module__ == errors.__name__:
            return kind.__name__
    return PipelineError.__name__


def _shared_type(name: str) -> type[Exception]:
    home = builtins if name in _SHARED_BUILTINS else errors
    kind: type[Exception] = getattr(home, name)
    return kind
