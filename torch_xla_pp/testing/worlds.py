"""A pool of worker processes, each of which is one rank of a job.

Importing torch_xla and compiling take seconds, so processes are kept and given one
function after the other. The number of XLA devices of a process is fixed when its
client is made: workers are kept by that number. Between two functions a worker leaves
its process group; nothing else is reset.

Law: a run ends. Every run has a time limit, and when a rank fails the others get a
short while to end by themselves; then they are killed, and their stacks are shown.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Any

GRACE_S = 15.0
_MAX_IDLE = 4
_START_S = 60.0
_KILLED = "Killed"
_DIED = "Died"
_TAIL_CHARACTERS = 3000


class WorldsFailed(RuntimeError):
    """Report that ranks of a run failed, with their tracebacks and output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Hold how one rank's function ended.

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
    """Own one worker process and the connection to it."""

    def __init__(self, num_devices: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="worlds-")
        address = str(Path(self._directory.name) / "socket")
        self._log = (Path(self._directory.name) / "log").open("w+b")
        env = os.environ | {
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": str(num_devices),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "torch_xla_pp.testing.worker", address]
        # Only this user may enter the directory, hence the socket has no password.
        with Listener(address, family="AF_UNIX") as listener:
            self._process = subprocess.Popen(
                command, env=env, stdout=self._log, stderr=self._log
            )
            # A worker that cannot start would leave accept() waiting.
            listener._listener._socket.settimeout(_START_S)  # type: ignore[attr-defined]
            self.connection: Connection = listener.accept()

    @property
    def pid(self) -> int:
        return self._process.pid

    def output(self) -> str:
        """Return the end of what the worker printed."""
        self._log.flush()
        text = Path(self._log.name).read_text(errors="replace")
        return text[-_TAIL_CHARACTERS:]

    def kill(self) -> str:
        """End the worker and return the stacks that it had."""
        before = len(self.output())
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
        stacks = self.output()[before:] or self.output()
        self._process.kill()
        self.close()
        return stacks

    def close(self) -> None:
        """Let the worker end; its connection is closed."""
        self.connection.close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._directory.cleanup()


class Worlds:
    """Run functions in every rank of a job, in reused processes.

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
        devices: int = 1,
        args: tuple[Any, ...] = (),
        timeout_s: float = 120.0,
    ) -> list[Any]:
        """Call `function(*args)` in every rank and return the results, by rank.

        The environment is as torchrun sets it.

        Args:
            function: A function of an importable module; its result must pickle.
            ranks: Number of ranks.
            devices: Number of XLA devices of each rank.
            args: Its arguments, equal on every rank.
            timeout_s: Limit of the whole run, in seconds.

        Raises:
            WorldsFailed: A rank failed or did not end in time.
        """
        outcomes = self.run_outcomes(
            function, ranks=ranks, devices=devices, args=args, timeout_s=timeout_s
        )
        failed = [
            f"--- rank {rank} of {ranks}, {devices} devices: {outcome.error}\n"
            f"{outcome.traceback}"
            for rank, outcome in enumerate(outcomes)
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
        devices: int = 1,
        args: tuple[Any, ...] = (),
        timeout_s: float = 120.0,
    ) -> list[Outcome]:
        """Do as `run`, but return how each rank ended and raise nothing."""
        workers = self._take(ranks, devices)
        port = _free_port()
        for rank, worker in enumerate(workers):
            worker.connection.send(
                {
                    "module": function.__module__,
                    "function": function.__qualname__,
                    "args": pickle.dumps(args),
                    "env": _torchrun_env(rank, ranks, port),
                    "path": sys.path,
                }
            )
        outcomes = _collect(workers, timeout_s)
        self._idle.setdefault(devices, []).extend(
            worker
            for worker, outcome in zip(workers, outcomes, strict=True)
            if outcome.error not in (_KILLED, _DIED)
        )
        return outcomes

    def close(self) -> None:
        """End all workers."""
        for workers in self._idle.values():
            for worker in workers:
                worker.close()
        self._idle.clear()

    def _take(self, ranks: int, devices: int) -> list[_Worker]:
        """Take idle workers, and start those that are missing."""
        idle = self._idle.setdefault(devices, [])
        taken = [idle.pop(0) for _ in range(min(ranks, len(idle)))]
        others = [w for workers in self._idle.values() for w in workers]
        missing = ranks - len(taken)
        for worker in others[: max(0, len(others) + ranks - _MAX_IDLE)]:
            for workers in self._idle.values():
                if missing and worker in workers:
                    workers.remove(worker)
                    worker.close()
        return taken + [_Worker(devices) for _ in range(missing)]


def _collect(workers: list[_Worker], timeout_s: float) -> list[Outcome]:
    """Wait for every rank; kill those that do not end."""
    outcomes: dict[int, Outcome] = {}
    limit = time.monotonic() + timeout_s
    while len(outcomes) < len(workers):
        waiting = {
            worker.connection: rank
            for rank, worker in enumerate(workers)
            if rank not in outcomes
        }
        for ready in wait(list(waiting), max(0.0, limit - time.monotonic())):
            rank = waiting[ready]  # type: ignore[index]
            outcomes[rank] = _outcome(workers[rank])
            if outcomes[rank].error:
                limit = min(limit, time.monotonic() + GRACE_S)
        if time.monotonic() >= limit:
            for rank in set(range(len(workers))) - set(outcomes):
                outcomes[rank] = Outcome(
                    error=_KILLED,
                    message="still running after the time limit",
                    traceback=workers[rank].kill(),
                )
    return [outcomes[rank] for rank in range(len(workers))]


def _outcome(worker: _Worker) -> Outcome:
    try:
        kind, content = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        output = worker.output()
        worker.close()
        return Outcome(error=_DIED, message="the process ended", traceback=output)
    if kind == "value":
        return Outcome(value=pickle.loads(content), pid=worker.pid)
    error, message, trace = content
    output = worker.output()
    return Outcome(
        error=error,
        message=message,
        traceback=f"{trace}\n--- output\n{output}",
        pid=worker.pid,
    )


def _torchrun_env(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
