"""The values and reports that the ranks of a group exchange, apart from tensors.

Terms: a *report* says that a rank has failed. A *generation* is the time between two
failures of the job; its number is the number of failures that a rank has seen. Every
rank leaves a generation in the same way, by raising once: its own error or the first
one reported. Rounds and messages of an older generation are void, so a step after a
failed one never sees leftovers of it.

A report says how many steps of its generation its rank had ended with the group. A rank
that has ended fewer *holds* it until it has ended as many: they have not failed, and
nothing that they need is missing.

Everything is broadcast to all ranks: along the tree of `Sockets`, in which each rank
forwards what it receives. So no rank polls, and a rank that waits is woken by the value
that it waits for or by the failure that prevents it. A rank whose connection ends
without a farewell is *lost*: that is a failure of all ranks, now and in every later
generation. One that has *left* is a failure only for those that need something from it.

Not for large or frequent data: all ranks get it.
"""

import builtins
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from torch_xla_pp import errors
from torch_xla_pp.errors import PipelineError, TransportError, TransportTimeout
from torch_xla_pp.phases import phase
from torch_xla_pp.transport.activity import Activity
from torch_xla_pp.transport.sockets import Sockets

POLL_S = 0.2
_GRACE_S = 0.3  # messages may arrive after the notice that their sender has left
_REPORT = "xla_pp_report"
_SHARED_BUILTINS = ("ValueError", "TypeError", "RuntimeError")


class Listener(Protocol):
    """A listener to failures, called from any thread; it never waits."""

    def report(self, generation: int, report: str, num_ended: int) -> None:
        """Receive a report that ends a generation, of this rank or of a peer.

        Args:
            generation: The generation.
            report: The report, see `Rendezvous.join`.
            num_ended: How many steps of the generation its rank had ended.
        """

    def end_step(self, generation: int, num_ended: int) -> None:
        """Note how many steps of a generation this rank has ended."""

    def end(self, generation: int) -> None:
        """Forget a generation that this rank has left."""


class _Entry(NamedTuple):
    """The key of a value: its name, its rank, and its generation, None for any."""

    name: str
    rank: int
    generation: int | None


class _Told(NamedTuple):
    """A report, and how many steps of its generation its rank had ended."""

    report: str
    num_ended: int


class _Raised(NamedTuple):
    """A report that was raised, and how many steps later than on the reporting rank."""

    report: str
    num_later: int


class _Fate(NamedTuple):
    """The reason why a rank is gone, and the time from which this is known here."""

    reason: str
    since_s: float


class Rendezvous:
    """The agreement of a group's ranks on values, and on each other's errors.

    It is larger than other classes since all of it is one state under one lock: waiting
    ends by a value, by a report, or by the loss of a rank.

    Args:
        sockets: The connections of the group.
        timeout_s: How long to wait for a peer, in seconds, where a call gives no
            other limit.
        job_rank: Rank of this process in the job, which reports of its errors name;
            None if it is the rank in the group.

    Attributes:
        activity: The activity of this rank, for reports.
        generation: How many failures of the job this rank has seen.
        num_ended: How many steps of this generation it has ended with the group.
    """

    def __init__(
        self, sockets: Sockets, timeout_s: float, job_rank: int | None = None
    ) -> None:
        self.rank, self.size = sockets.rank, sockets.size
        self.timeout_s = timeout_s
        self.activity = Activity()
        self._job_rank = self.rank if job_rank is None else job_rank
        self._sockets = sockets
        self._changed = threading.Condition()
        self._values: dict[_Entry, bytes] = {}
        self._fates: dict[int, _Fate] = {}
        self._lost: str | None = None
        self._titles: dict[int, str] = {}
        self.generation = 0
        self.num_ended = 0
        self._rounds: Counter[str] = Counter()
        self._meetings: Counter[str] = Counter()
        self._relayed: BaseException | None = None
        self._told: dict[int, _Told] = {}
        self._last = ""
        self._listeners: list[Listener] = []
        self._others: list[Rendezvous] = []
        sockets.on("control", self._receive)
        sockets.on_gone(self._lose)

    def join(self, listener: Listener) -> None:
        """Forward the reports that this rank makes or receives to `listener`, too.

        A report is a text of at least four lines: the rank, the type of its error, the
        context, and the error's text.
        """
        self._listeners.append(listener)

    def link(self, other: "Rendezvous") -> None:
        """Forward failures in this group to another group of this rank."""
        if other is not self and other not in self._others:
            self._others.append(other)

    def name_ranks(self, titles: Mapping[int, str]) -> None:
        """Set the names of ranks in the texts of errors."""
        self._titles = dict(titles)

    # Values.

    def publish(self, name: str, value: Any) -> None:
        """Send `value`, which must pickle, to every rank that reads `name`."""
        entry = _Entry(name, self.rank, None)
        data = pickle.dumps(value)
        self._keep(entry, data)
        self._flood("value", *entry, data)

    def announce(self, name: str, value: Any) -> None:
        """Send `value` to every other rank that takes `name` in this generation."""
        entry = _Entry(name, self.rank, self.generation)
        self._flood("value", *entry, pickle.dumps(value))

    def read(self, name: str, from_rank: int, timeout_s: float | None = None) -> Any:
        """Wait for the value that `from_rank` publishes as `name`, and return it.

        Raises:
            TransportTimeout: It was not published within `timeout_s` seconds.
            TransportError: That rank is gone.
            Exception: A peer has reported a failure, see `check`.
        """
        entry = _Entry(name, from_rank, None)
        self._await([entry], name, timeout_s)
        return pickle.loads(self._values[entry])

    def take(self, name: str, from_rank: int, timeout_s: float | None = None) -> Any:
        """Wait for the value that `from_rank` announces as `name`, and return it, once.

        Raises:
            Exception: As by `read`.
        """
        entry = _Entry(name, from_rank, self.generation)
        self._await([entry], name, timeout_s)
        with self._changed:
            return pickle.loads(self._values.pop(entry))

    def exchange(
        self, name: str, value: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Return the `value` of every rank, by rank. All ranks must call.

        Each call with the same name is a new round.

        Raises:
            TransportTimeout: A rank did not call within `timeout_s` seconds.
            TransportError: A rank is gone.
            Exception: A peer has reported a failure, see `check`.
        """
        number = self._rounds[name]
        self._rounds[name] += 1
        own = _Entry(f"{name}/{number}", self.rank, self.generation)
        data = pickle.dumps(value)
        self._flood("value", *own, data)
        entries = [own._replace(rank=rank) for rank in range(self.size)]
        self._keep(own, data)
        self._await(entries, name, timeout_s)
        with self._changed:
            return [pickle.loads(self._values.pop(entry)) for entry in entries]

    def meet(self, name: str, timeout_s: float, value: Any = None) -> list[Any]:
        """Wait for all ranks, also those that have yet to leave a failed generation.

        Reported failures are raised by the calls that they concern, not here. So a
        thread other than the one that trains may call.

        Args:
            name: Each call with the same name is a new round.
            timeout_s: How long to wait.
            value: A value for the others.

        Returns:
            The `value` of every rank, by rank.

        Raises:
            TransportTimeout: A rank did not call in time.
            TransportError: A rank is gone.
        """
        number = self._meetings[name]
        self._meetings[name] += 1
        own = _Entry(f"{name}/{number}", self.rank, None)
        data = pickle.dumps(value)
        self._flood("value", *own, data)
        entries = [own._replace(rank=rank) for rank in range(self.size)]
        self._keep(own, data)
        self._await(entries, name, timeout_s, raises_reports=False)
        with self._changed:
            return [pickle.loads(self._values.pop(entry)) for entry in entries]

    @phase("other ranks")
    def _await(
        self,
        entries: Collection[_Entry],
        name: str,
        timeout_s: float | None,
        *,
        raises_reports: bool = True,
    ) -> None:
        """Wait for values."""

        def missing() -> list[int]:
            return [entry.rank for entry in entries if entry not in self._values]

        def is_over() -> bool:
            return not self.calm() if raises_reports else self._lost is not None

        def is_there(limit_s: float) -> bool:
            with self._changed:
                self._changed.wait_for(
                    lambda: not missing() or is_over() or self._gone_of(missing()),
                    limit_s,
                )
                return not missing()

        self.wait_until(
            is_there,
            timeout_s,
            lambda: f"{self.titles(missing())}: {name!r}",
            missing,
            raises_reports=raises_reports,
        )

    def _keep(self, entry: _Entry, data: bytes) -> None:
        with self._changed:
            if entry.generation is None or entry.generation >= self.generation:
                self._values[entry] = data
                self._changed.notify_all()

    # Failures.

    def end_step(self) -> None:
        """Note the end of a step; what was held until then may be raised."""
        with self._changed:
            self.num_ended += 1
            self._changed.notify_all()
        for listener in self._listeners:
            listener.end_step(self.generation, self.num_ended)

    def tell_others(self) -> None:
        """Report the failure that is to be raised, if there is one, to other groups.

        After the end of a step they are told when they have noted it, too.
        """
        with self._changed:
            due = self._due()
            if due is None:
                return
            num_later = self.num_ended - due.num_ended
        for other in self._others:
            other.pass_on(due.report, num_later)

    def receive_report(self, generation: int, report: str, num_ended: int = 0) -> None:
        """Receive the report of a failure; any thread may call.

        Of several for one generation, that of the earliest step counts, and of these
        the first.

        Args:
            generation: The generation that has failed.
            report: The report.
            num_ended: How many steps of the generation its rank had ended; 0 if the
                report is not to be held.
        """
        with self._changed:
            if generation < self.generation or self._is_told(generation, num_ended):
                return
            self._told[generation] = _Told(report, num_ended)
            self._changed.notify_all()
        for listener in self._listeners:
            listener.report(generation, report, num_ended)
        self.tell_others()

    def pass_on(self, report: str, num_later: int) -> None:
        """Report a failure in another group to this group.

        Args:
            report: The report.
            num_later: How many more steps this rank has ended with the other group than
                the rank that failed, and with this group at most.
        """
        generation, num_ended = self.generation, max(0, self.num_ended - num_later)
        if report == self._last or self._is_told(generation, num_ended):
            return
        self._last = report
        self._flood("report", generation, report, num_ended)
        self.receive_report(generation, report, num_ended)

    def report(self, error: BaseException, context: str = "") -> None:
        """Report to all ranks that this one fails with `error`.

        Of several reports in one generation, the first counts. An error that was
        reported before, by this rank or a peer, or that was caused by such an error, is
        not reported again. One that a peer in another group has reported is forwarded.

        Args:
            error: The error that this rank is about to raise.
            context: Activity of the rank, appended to the text for the peers; by
                default the present one.
        """
        if self._is_relayed(error):
            return
        context = context or str(self.activity)
        own = self._report_of(error, context)
        report, num_later = _raised(error) or (own, 0)
        self._last = report
        told = self.generation, report, max(0, self.num_ended - num_later)
        self._flood("report", *told)
        for listener in self._listeners:
            listener.report(*told)
        self._relayed = error
        self._advance()
        if context and report == own:
            _note(error, f"On rank {self._job_rank}: {context}.")

    def fail(self, generation: int, error: Exception, context: str) -> None:
        """Report an error on a thread to all ranks, including this one.

        The next call of each rank raises it, see `check`, in whatever step it is; any
        thread may call.

        Args:
            generation: The generation that has failed.
            error: The error.
            context: The activity of the thread.
        """
        report = self._report_of(error, context)
        self._flood("report", generation, report, 0)
        self.receive_report(generation, report)

    @contextmanager
    def reporting(self, context: str = "") -> Iterator[None]:
        """Report every exception that leaves the block."""
        try:
            yield
        except BaseException as error:
            self.report(error, context)
            raise

    def calm(self) -> bool:
        """Return whether there is no failure to be raised."""
        return self._due() is None

    def check(self) -> None:
        """Raise if any rank has reported a failure or is lost; once for each failure.

        Raises:
            Exception: The peer's own type of error where that is ValueError,
                TypeError, RuntimeError or one of `torch_xla_pp.errors` (or a subclass
                of one, as that one), else PipelineError.
        """
        due = self._due()
        if due is None:
            return
        report, num_ended = due
        raised = _Raised(report, self.num_ended - num_ended)
        rank, kind, context, text = report.split("\n", 3)
        self._last = report
        self._advance()
        where = f": {context}" if context else ""
        origin = f" (raised on rank {rank})" if rank else ""
        error = _shared_type(kind)(f"{text}{origin}{where}")
        here = str(self.activity)
        _note(error, f"Seen on rank {self._job_rank}: {here}." if here else "")
        vars(error)[_REPORT] = raised
        self._relayed = error
        raise error

    def check_there(self, ranks: Collection[int]) -> None:
        """Raise if one of some ranks is gone.

        Raises:
            TransportError: It is; the error names it.
        """
        for rank in self._gone_of(ranks):
            raise TransportError(self._gone_text(rank))

    def wait_until(
        self,
        is_ready: Callable[[float], bool],
        timeout_s: float | None,
        missing: Callable[[], str],
        needed: Callable[[], Collection[int]] = tuple,
        *,
        raises_reports: bool = True,
    ) -> None:
        """Wait for `is_ready`, raising as soon as a peer reports a failure.

        Args:
            is_ready: Takes the number of seconds that it may wait, at most `POLL_S`.
            timeout_s: The limit, by default that of the rendezvous.
            missing: Returns the text to put before the hint when time is up.
            needed: Returns the ranks that must be there.
            raises_reports: Whether reports are raised; the loss of a rank always is.

        Raises:
            TransportTimeout: The limit has passed.
            TransportError: A rank that is needed is gone.
            Exception: A peer has reported a failure, see `check`.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        start_s = time.monotonic()
        while not is_ready(min(POLL_S, max(0.0, start_s + limit_s - time.monotonic()))):
            try:
                if raises_reports or self._lost is not None:
                    self.check()
                self.check_there(needed())
            except Exception as error:
                _note(error, f"Rank {self.rank} was waiting for {missing()}.")
                raise
            if time.monotonic() - start_s >= limit_s:
                raise TransportTimeout(
                    f"rank {self.rank} waited {limit_s:g} s for {missing()}. See "
                    f"whether that rank still runs, or set TORCH_XLA_PP_TIMEOUT_S to "
                    f"more seconds."
                )

    def title(self, rank: int) -> str:
        """Return e.g. "rank 1 (stage 1)"."""
        title = self._titles.get(rank)
        return f"rank {rank}" + (f" ({title})" if title else "")

    def titles(self, ranks: Collection[int]) -> str:
        """Return the titles of ranks, the first few of many."""
        few = [self.title(rank) for rank in list(ranks)[:8]]
        return ", ".join([*few, *["and others"] * (len(ranks) > len(few))])

    # On the thread of the connections.

    def _receive(self, peer: int, content: Any, parts: list[Tensor]) -> None:
        """Receive a frame of a neighbour, and forward it."""
        self._flood(*content, except_for=peer)
        what, *fields = content
        if what == "value":
            self._keep(_Entry(*fields[:3]), fields[3])
        elif what == "report":
            self.receive_report(*fields)
        else:
            self._take_fate(*fields)

    def _lose(self, rank: int, reason: str, is_lost: bool) -> None:
        """Report to the others that the connection to a rank has ended."""
        self._flood("gone", rank, reason, is_lost)
        self._take_fate(rank, reason, is_lost)

    def _take_fate(self, rank: int, reason: str, is_lost: bool) -> None:
        with self._changed:
            if rank in self._fates:
                return
            self._fates[rank] = _Fate(reason, time.monotonic())
            self._changed.notify_all()
        if is_lost:
            text = self._gone_text(rank)
            self._lost = self._lost or f"\n{TransportError.__name__}\n\n{text}"
            self.receive_report(self.generation, self._lost)

    def _flood(self, *content: Any, except_for: int | None = None) -> None:
        for neighbour in self._sockets.neighbours:
            if neighbour != except_for and self._sockets.fate(neighbour) is None:
                self._sockets.send_if_there(neighbour, "control", content)

    # Helpers.

    def _gone_of(self, ranks: Collection[int]) -> list[int]:
        """Return those of some ranks that are gone, after the news has spread."""
        now_s = time.monotonic()
        found = [(rank, self._fates.get(rank)) for rank in ranks]
        return [
            rank for rank, fate in found if fate and now_s >= fate.since_s + _GRACE_S
        ]

    def _due(self) -> _Told | None:
        """Return the report that ends this generation now, None if there is none."""
        told = self._told.get(self.generation)
        return told if told is not None and told.num_ended <= self.num_ended else None

    def _is_told(self, generation: int, num_ended: int) -> bool:
        """Return whether a report of the same step or an earlier one is known."""
        told = self._told.get(generation)
        return told is not None and told.num_ended <= num_ended

    def _report_of(self, error: BaseException, context: str) -> str:
        text = str(error) or type(error).__name__
        head = self._job_rank, _shared_type_name(error), context.replace("\n", " ")
        return "\n".join([*map(str, head), text])

    def _gone_text(self, rank: int) -> str:
        reason = self._fates[rank].reason
        return (
            f"{self.title(rank)} is gone: {reason}. Look for the first error of rank "
            f"{rank}."
        )

    def _advance(self) -> None:
        with self._changed:
            ended = self.generation
            self._told.pop(ended, None)
            self.generation += 1
            self.num_ended = 0
            if self._lost is not None:
                self._told[self.generation] = _Told(self._lost, 0)
            for entry in [e for e in self._values if e.generation == ended]:
                del self._values[entry]
            self._rounds.clear()
        for listener in self._listeners:
            listener.end(ended)

    def _is_relayed(self, error: BaseException | None) -> bool:
        if error is None or self._relayed is None:
            return False
        return error is self._relayed or self._is_relayed(
            error.__cause__ or error.__context__
        )


def _note(error: BaseException, text: str) -> None:
    """Add a note to an error, once."""
    if text and text not in getattr(error, "__notes__", ()):
        error.add_note(text)


def _raised(error: BaseException | None) -> _Raised | None:
    """Return the report of a peer that has led to an error, None if there is none."""
    if error is None:
        return None
    found: _Raised | None = vars(error).get(_REPORT)
    return found or _raised(error.__cause__ or error.__context__)


def _shared_type_name(error: BaseException) -> str:
    for kind in type(error).__mro__:
        if kind.__name__ in _SHARED_BUILTINS or kind.__module__ == errors.__name__:
            return kind.__name__
    return PipelineError.__name__


def _shared_type(name: str) -> type[Exception]:
    home = builtins if name in _SHARED_BUILTINS else errors
    kind: type[Exception] = getattr(home, name)
    return kind
