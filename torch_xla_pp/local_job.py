"""A job of a few ranks on this machine, started as torchrun would."""

import errno
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO

# Linux gives ports from 32768 on to connections, other systems from 49152 on.
_PORTS = range(20000, 32768)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """The end of a rank.

    Args:
        code: Its exit code, None if it had to be killed.
        output: Its output, empty unless `is_quiet`.
    """

    code: int | None
    output: str


def run_locally(
    arguments: Sequence[str],
    *,
    ranks: int,
    devices: int | None = None,
    timeout_s: float | None = None,
    is_quiet: bool = False,
    variables: Mapping[str, str] | None = None,
) -> list[RankResult]:
    """Run Python in every rank of a job; wait for all, and kill those that are late.

    Args:
        arguments: What follows `python`.
        ranks: Number of ranks.
        devices: CPU devices of each, None for those of the environment.
        timeout_s: How long to wait, None for ever.
        is_quiet: Whether to keep their output, in place of showing it.
        variables: Further environment variables of all ranks.

    Returns:
        How each rank ended.
    """
    with ExitStack() as stack:
        files, processes = [], []
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in range(ranks):
            file = stack.enter_context(tempfile.TemporaryFile("w+"))
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
            if devices is not None:
                own["CPU_NUM_DEVICES"] = devices
            env = _own_environment() | dict(variables or {}) | address
            env |= {name: str(value) for name, value in own.items()}
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=env,
                stdout=file if is_quiet else None,
                stderr=subprocess.STDOUT if is_quiet else None,
            )
            stack.callback(_end, process)
            files.append(file)
            processes.append(process)
        codes = _wait(processes, timeout_s)
        for process in processes:
            _end(process)
        return [
            RankResult(code=code, output=_read(file))
            for code, file in zip(codes, files, strict=True)
        ]


def _own_environment() -> dict[str, str]:
    """Return the environment without the variables of a launcher around this job."""
    return {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("TORCHELASTIC_")
    }


def free_port() -> int:
    """Return a port of this host on which no process listens.

    It is none that the system gives to connections by itself, as one of those could
    have it before a rank listens there.
    """
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], timeout_s: float | None
) -> list[int | None]:
    """Return exit codes, None for processes that have not ended in time."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    codes: list[int | None] = []
    for process in processes:
        left = None if end is None else max(0.0, end - time.monotonic())
        try:
            codes.append(process.wait(left))
        except subprocess.TimeoutExpired:
            codes.append(None)
    return codes


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
