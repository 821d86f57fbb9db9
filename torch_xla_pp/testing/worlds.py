"""A pool of worker processes, each of which is one rank of a job.

Importing torch_xla and compiling take seconds, so processes are forked from a server
that has imported it, and are kept and given one function after the other. The number
of XLA devices of a process is fixed when its client is made: workers are kept by that
number. Between two functions a worker leaves its process group; nothing else is reset.

Laws: a run ends. Every run has a time limit, and when a rank fails the others get a
short time to end by themselves; then they are killed, and their stacks are shown. After
a run in which a rank failed its workers are not used again, since the state of their
transport is unknown. No worker outlives the process that made it.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, forkserver
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, cast

from torch_xla_pp.local_job import free_port
from torch_xla_pp.testing.worker import run_worker

_CONTEXT = multiprocessing.get_context("forkserver")
GRACE_S = 10.0
_MAX_IDLE = 8
_START_S = 120.0
_DUMP_S = 0.5
_KILLED = "Killed"
_DIED = "Died"
_TAIL_CHARACTERS = 3000


class WorldsFailed(RuntimeError):
    """A run in which ranks failed, with their tracebacks and output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The end of one rank's function: its result, or its error.

    Attributes:
        value: What it returned, None if it failed.
        error: Name of the exception's type, "" if there was none.
        message: Text of the exception.
        traceback: Its traceback, or the stack of a rank that had to be killed.
        pid: The worker's process id.
    """

    value: Any = None
    error: str = ""
    message: str = ""
    traceback: str = ""
    pid: int = 0


class _Worker:
    """One worker process, the connection to it and the file of its output."""

    def __init__(self, num_devices: int) -> None:
        self._log = tempfile.NamedTemporaryFile()
        self._run_start = 0
        self.connection, child = Pipe()
        environment = os.environ | _worker_env(num_devices)
        _ensure_server(environment)
        with child:
            self._process = _CONTEXT.Process(
                target=run_worker,
                args=(child, self._log.name, environment),
                daemon=True,
            )
            self._process.start()

    @property
    def pid(self) -> int:
        return cast(int, self._process.pid)

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def is_ready(self, limit_s: float) -> bool:
        """Wait for the worker to be free; False if it ended or takes longer."""
        try:
            return self.connection.poll(limit_s) and self.connection.recv() == "ready"
        except (EOFError, ConnectionError):
            return False

    def begin(self, task: dict[str, Any]) -> None:
        """Send a task. A worker that has died is seen when its answer is read."""
        self._run_start = self.num_log_bytes()
        with contextlib.suppress(ConnectionError):
            self.connection.send(task)

    def num_log_bytes(self) -> int:
        return os.fstat(self._log.fileno()).st_size

    def output(self, start: int | None = None) -> str:
        """Return the end of the output since byte `start` or in this run."""
        start = self._run_start if start is None else start
        data = os.pread(self._log.fileno(), self.num_log_bytes() - start, start)
        return data.decode(errors="replace")[-_TAIL_CHARACTERS:]

    def ask_for_stacks(self) -> None:
        """Let the worker print the stacks of its threads, soon."""
        os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """End the worker at once."""
        self._process.kill()
        self.close()

    def close(self) -> int:
        """Let the worker end and return its exit code."""
        self.connection.close()
        self._process.join(GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._log.close()
        return cast(int, self._process.exitcode)


class Worlds:
    """A pool of processes that run functions in every rank of a job.

    Workers load the main script of the caller's process under another name, as
    `multiprocessing` does: code that a script runs belongs under `if __name__ ==
    "__main__"`.

    Example:
        >>> with Worlds() as worlds:
        ...     results = worlds.run(train, ranks=2, devices=2, args=(job,))
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[_Worker]] = {}

    def __enter__(self) -> "Worlds":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *,
        ranks: int,
        devices: int | Sequence[int] = 1,
        args: tuple[Any, ...] = (),
        timeout_s: float = 120.0,
        keep_workers: bool = False,
    ) -> list[Any]:
        """Call `function(*args)` in every rank and return the results, by rank.

        The environment is as torchrun sets it, and random numbers begin alike on all
        ranks, with seed 0.

        Args:
            function: A function of an importable module; its result must pickle.
            ranks: Number of ranks.
            devices: Number of XLA devices of each rank, one for all or one for each.
            args: Its arguments, equal on every rank.
            timeout_s: Limit of the whole run, in seconds. Starting workers does not
                count.
            keep_workers: Use the workers again even if a rank fails, because the
                failure leaves nothing behind, such as a message under way.

        Raises:
            WorldsFailed: A rank failed or did not end in time.
        """
        outcomes = self.run_outcomes(
            function,
            ranks=ranks,
            devices=devices,
            args=args,
            timeout_s=timeout_s,
            keep_workers=keep_workers,
        )
        failed = [
            f"--- rank {rank} of {ranks}, {count} devices: {outcome.error}: "
            f"{outcome.message}\n{outcome.traceback}"
            for rank, (outcome, count) in enumerate(
                zip(outcomes, _counts(ranks, devices), strict=True)
            )
            if outcome.error
        ]
        if failed:
            raise WorldsFailed(f"{function.__name__}:\n" + "\n".join(failed))
        return [outcome.value for outcome in outcomes]

    def run_outcomes(
        self,
        function: Callable[..., Any],
        *,
        ranks: int,
        devices: int | Sequence[int] = 1,
        args: tuple[Any, ...] = (),
        timeout_s: float = 120.0,
        keep_workers: bool = False,
    ) -> list[Outcome]:
        """Run as `run` does, but return how each rank ended instead of raising.

        Raises:
            WorldsFailed: A worker could not be started.
        """
        task = {
            "module": function.__module__,
            "function": function.__qualname__,
            "args": pickle.dumps(args),
            "path": sys.path,
        }
        counts = _counts(ranks, devices)
        workers = self._take(counts)
        try:
            port = free_port()
            for rank, worker in enumerate(workers):
                worker.begin(task | {"env": _torchrun_env(rank, ranks, port)})
            outcomes = _collect(workers, timeout_s)
        except BaseException:
            # An interrupt, say of pytest-timeout: the ranks may hang.
            for worker in workers:
                worker.kill()
            raise
        keep = keep_workers or not any(outcome.error for outcome in outcomes)
        self._put_back(workers, counts, keep)
        return outcomes

    def close(self) -> None:
        """End all workers."""
        self._close_idle(keep=0)

    def _take(self, counts: Sequence[int]) -> list[_Worker]:
        """Take idle workers, and start those that are missing.

        Args:
            counts: Number of devices of each rank.
        """
        taken = {n: self._take_idle(n, counts.count(n)) for n in dict.fromkeys(counts)}
        used = [(count, worker) for count in taken for worker in taken[count]]
        missing = [n for n in taken for _ in range(counts.count(n) - len(taken[n]))]
        if missing:
            self._close_idle(keep=max(0, _MAX_IDLE - len(counts)))
        try:
            for count, worker in zip(missing, _start(missing), strict=True):
                taken[count].append(worker)
        except BaseException:
            for count, worker in used:
                self._idle[count].append(worker)
            raise
        return [taken[count].pop(0) for count in counts]

    def _take_idle(self, devices: int, ranks: int) -> list[_Worker]:
        """Take at most `ranks` workers that have nothing to do."""
        idle = self._idle.setdefault(devices, [])
        for worker in [worker for worker in idle if not worker.is_alive()]:
            idle.remove(worker)
            worker.close()
        # Workers that were used last, which have compiled programs.
        taken, idle[:] = idle[-ranks:], idle[:-ranks]
        return taken

    def _put_back(
        self, workers: Sequence[_Worker], counts: Sequence[int], keep: bool
    ) -> None:
        """Make workers idle again; close those that must not or cannot be used."""
        for worker, count in zip(workers, counts, strict=True):
            if keep and worker.is_alive() and worker.is_ready(GRACE_S):
                self._idle[count].append(worker)
            else:
                worker.close()

    def _close_idle(self, *, keep: int) -> None:
        excess = sum(map(len, self._idle.values())) - keep
        for workers in self._idle.values():
            while workers and excess > 0:
                workers.pop(0).close()
                excess -= 1


def _ensure_server(environment: dict[str, str]) -> None:
    """Start the server that workers are forked from, if it does not run.

    Libraries that it loads take their numbers of threads from its environment.
    """
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        _CONTEXT.set_forkserver_preload([run_worker.__module__])
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _counts(ranks: int, devices: int | Sequence[int]) -> list[int]:
    """Return the number of devices of each rank."""
    counts = [devices] * ranks if isinstance(devices, int) else list(devices)
    if len(counts) != ranks:
        raise ValueError(
            f"devices: expected one number for each of {ranks} ranks, got {devices}. "
            "Pass one number for all, or as many as there are ranks."
        )
    return counts


def _start(counts: Sequence[int]) -> list[_Worker]:
    """Start workers with these numbers of devices, side by side."""
    workers: list[_Worker] = []
    try:
        workers += map(_Worker, counts)
        for worker in workers:
            if not worker.is_ready(_START_S):
                raise WorldsFailed(
                    f"a worker did not start within {_START_S:g} s:\n{worker.output()}"
                )
    except BaseException:
        for worker in workers:
            worker.kill()
        raise
    return workers


def _collect(workers: list[_Worker], timeout_s: float) -> list[Outcome]:
    """Wait for every rank; kill those that do not end."""
    outcomes: dict[int, Outcome] = {}
    limit = time.monotonic() + timeout_s
    reason = f"still running after {timeout_s:g} s"
    while len(outcomes) < len(workers):
        waiting = {
            worker.connection: rank
            for rank, worker in enumerate(workers)
            if rank not in outcomes
        }
        for ready in wait(list(waiting), max(0.0, limit - time.monotonic())):
            rank = waiting[ready]  # type: ignore[index]
            outcomes[rank] = _outcome(workers[rank])
            if outcomes[rank].error and time.monotonic() + GRACE_S < limit:
                limit = time.monotonic() + GRACE_S
                reason = f"still running {GRACE_S:g} s after rank {rank} failed"
        if time.monotonic() >= limit:
            late = sorted(set(range(len(workers))) - set(outcomes))
            stacks = _kill([workers[rank] for rank in late])
            for rank, stack in zip(late, stacks, strict=True):
                outcomes[rank] = Outcome(
                    error=_KILLED,
                    message=f"{reason}, killed",
                    traceback=stack,
                    pid=workers[rank].pid,
                )
    return [outcomes[rank] for rank in range(len(workers))]


def _kill(workers: Sequence[_Worker]) -> list[str]:
    """End workers at once; return each one's stacks, then its output."""
    starts = [worker.num_log_bytes() for worker in workers]
    printed = [worker.output() for worker in workers]
    for worker in workers:
        worker.ask_for_stacks()
    time.sleep(_DUMP_S)
    texts = []
    for worker, start, output in zip(workers, starts, printed, strict=True):
        texts.append(f"{worker.output(start)}\n--- output\n{output}")
        worker.kill()
    return texts


def _outcome(worker: _Worker) -> Outcome:
    try:
        kind, content = worker.connection.recv()
    except (EOFError, ConnectionError):
        # The process may not have ended yet, only its connection.
        output, code = worker.output(), worker.close()
        return Outcome(
            error=_DIED,
            message=f"the process ended with code {code}",
            traceback=f"--- output\n{output}",
            pid=worker.pid,
        )
    if kind == "value":
        return Outcome(value=pickle.loads(content), pid=worker.pid)
    error, message, trace = content
    return Outcome(
        error=error,
        message=message,
        traceback=f"{trace}\n--- output\n{worker.output()}",
        pid=worker.pid,
    )


def _worker_env(num_devices: int) -> dict[str, str]:
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(num_devices),
        # The ranks share the machine's cores.
        "OMP_NUM_THREADS": "1",
        # One notice per compiled program would hide what a test prints.
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def _torchrun_env(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
