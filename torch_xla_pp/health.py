"""Whether a machine can run pipelines: what is wrong, and how to fix it.

The checks need neither torch nor devices, so that they work where these do not. The
last one, the *ping*, runs a small pipeline in two ranks of its own and shows what the
first error of it was.
"""

import difflib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch_xla_pp import env
from torch_xla_pp.local_job import run_locally
from torch_xla_pp.text import bytes_text, seconds_text

CheckState = Literal["ok", "note", "wrong"]

_VERSIONS = {"torch": "2.9.", "torch_xla": "2.9.", "libucx-cu12": "1."}
# Kind of devices → the package that torch_xla drives them by.
_DEVICES = {
    "CPU": "torch_xla",
    "TPU": "libtpu",
    "NEURON": "libneuronxla",
    "CUDA": "torch_xla_cuda_plugin",
}
_LEAST_SHM_BYTES = 256 << 20
_LEAST_FILES = 512
_PING = "torch_xla_pp ping "


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The result of one check.

    Args:
        name: What was checked.
        state: "ok"; "note" for what works, but at a cost; or "wrong".
        found: What was found.
        remedy: What to do, empty if nothing is to be done.
    """

    name: str
    state: CheckState
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The results of `doctor`; prints as a list."""

    checks: tuple[Check, ...]

    @property
    def is_healthy(self) -> bool:
        """Return whether nothing is wrong."""
        return all(check.state != "wrong" for check in self.checks)

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = []
        for check in self.checks:
            lines.append(f"{check.state:5}  {check.name:{width}}  {check.found}")
            if check.remedy:
                lines.append(f"{'':5}  {'':{width}}  → {check.remedy}")
        return "\n".join(lines)


def doctor(*, ping: bool = True, timeout_s: float = 300.0) -> Diagnosis:
    """Check whether this machine can run pipelines.

    Checks versions, the compiled library with UCX and the compiler, ports, shared
    memory, thread pools, open files, and environment variables; then runs a pipeline of
    two ranks on CPU devices, in processes of its own.

    Args:
        ping: Whether to run that pipeline, which takes about ten seconds.
        timeout_s: How long it may take.

    Returns:
        The results; `print` them.

    Example:
        >>> print(xpp.doctor(ping=False))
    """
    found = [check for look in _LOOKS for check in look()]
    if ping:
        found.append(_ping(timeout_s))
    return Diagnosis(checks=tuple(found))


def _python() -> Iterator[Check]:
    version = platform.python_version()
    fits = sys.version_info[:2] == (3, 11)
    remedy = (
        "" if fits else "Use Python 3.11, which torch_xla 2.9 and this package need."
    )
    yield Check(
        name="Python", state="ok" if fits else "wrong", found=version, remedy=remedy
    )


def _versions() -> Iterator[Check]:
    for package, prefix in _VERSIONS.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        fits = version.startswith(prefix)
        remedy = "" if fits else f"Run: pip install '{package}=={prefix}*'"
        yield Check(
            name=package,
            state="ok" if fits else "wrong",
            found=version or "not installed",
            remedy=remedy,
        )


def _library() -> Iterator[Check]:
    found = sorted(Path(__file__).parent.glob("_native*.so"))
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found:
        size = bytes_text(found[0].stat().st_size)
        text = f"{found[0].name}, {size}"
        yield Check(name="compiled library", state="ok", found=text)
    else:
        yield Check(
            name="compiled library",
            state="note",
            found="not there: stages send through the host, which is slower",
            remedy="Install a wheel that has it, or install again from the sources, "
            "with a C++17 compiler.",
        )
    is_needed = not found and compiler is None
    yield Check(
        name="compiler",
        state="note" if is_needed else "ok",
        found=compiler or "none, which only an installation from sources needs",
    )


def _ports() -> Iterator[Check]:
    hosts = dict.fromkeys((env.master_host() or "127.0.0.1", socket.gethostname()))
    for host in hosts:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0)[0]
            with socket.socket(family) as listener:
                if host == socket.gethostname() or host == "127.0.0.1":
                    listener.bind(address)
            yield Check(name="network", state="ok", found=f"{host} is {address[0]}")
        except OSError as error:
            yield Check(
                name="network",
                state="wrong",
                found=f"{host}: {error}",
                remedy="Ranks find each other by this name. Add it to /etc/hosts, or "
                "set MASTER_ADDR to an address that all hosts reach.",
            )


def _shared_memory() -> Iterator[Check]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield Check(
            name="shared memory", state="note", found="no /dev/shm: ranks use sockets"
        )
        return
    free = shutil.disk_usage(folder).free
    is_enough = free >= _LEAST_SHM_BYTES
    yield Check(
        name="shared memory",
        state="ok" if is_enough else "wrong",
        found=f"{bytes_text(free)} free",
        remedy=""
        if is_enough
        else f"UCX needs about {bytes_text(_LEAST_SHM_BYTES)} in /dev/shm. Remove what "
        "is left there; in a container, start it with --shm-size=1g.",
    )


def _threads() -> Iterator[Check]:
    cores, devices = len(os.sched_getaffinity(0)), env.num_cpu_devices()
    given = [f"{n}={text}" for n, text in env.given("PJRT_NPROC", "NPROC").items()]
    needed = 2 if devices == 1 else 2 * devices + 1
    is_enough = not given or env.pool_size() >= needed
    yield Check(
        name="threads",
        state="ok" if is_enough else "note",
        found=f"{cores} cores, {devices} CPU devices a rank"
        + (f", {', '.join(given)}" if given else ""),
        remedy=""
        if is_enough
        else f"{needed} threads are needed, and will be made. Unset the variable.",
    )


def _open_files() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = soft >= _LEAST_FILES or soft == resource.RLIM_INFINITY
    yield Check(
        name="open files",
        state="ok" if is_enough else "note",
        found=f"{soft} of {hard}",
        remedy="" if is_enough else f"Run: ulimit -n {min(4096, hard)}",
    )


def _is_installed(kind: str) -> bool:
    if kind == "TPU" and env.tpu_library() is not None:
        return True
    return importlib.util.find_spec(_DEVICES[kind]) is not None


def _devices() -> Iterator[Check]:
    kind, count = env.device_kind(), env.given("CPU_NUM_DEVICES")
    remedy = ""
    if kind and kind not in _DEVICES:
        remedy = f"Set it to one of {', '.join(_DEVICES)}."
    elif kind and not _is_installed(kind):
        remedy = f"Install {_DEVICES[kind]}, or set it to CPU."
    yield Check(
        name="PJRT_DEVICE",
        state="wrong" if remedy else "ok",
        found=kind or "not set: what torch_xla finds, else CPU",
        remedy=remedy,
    )
    for name, text in count.items():
        is_count = text.isdigit() and int(text) > 0
        yield Check(
            name=name,
            state="ok" if is_count else "wrong",
            found=text,
            remedy="" if is_count else "Set it to the number of devices of a rank.",
        )


def _variables() -> Iterator[Check]:
    """Check for variables of this package with unknown names or wrong values."""
    known = env.variables()
    for name in env.unknown():
        close = difflib.get_close_matches(name, known, 1, 0.85)
        yield Check(
            name=name,
            state="wrong",
            found="nothing reads it",
            remedy=f"Did you mean {close[0]}?"
            if close
            else f"There are {', '.join(known)}.",
        )
    looks: dict[str, Callable[[], object]] = {
        "TORCH_XLA_PP_TIMEOUT_S": env.timeout_s,
        "TORCH_XLA_PP_PRODUCTS": env.products,
        "TORCH_XLA_PP_TRANSPORT": lambda: env.transport(("in_graph", "host")),
    }
    for name, text in env.given(*looks).items():
        fault = ""
        try:
            looks[name]()
        except ValueError as error:
            fault = str(error)
        yield Check(
            name=name, state="wrong" if fault else "ok", found=text, remedy=fault
        )


_LOOKS: tuple[Callable[[], Iterator[Check]], ...] = (
    _python,
    _versions,
    _library,
    _ports,
    _shared_memory,
    _threads,
    _open_files,
    _devices,
    _variables,
)


def _ping(timeout_s: float) -> Check:
    """Run a step of a small pipeline in two ranks on CPU devices."""
    begin = time.monotonic()
    ended = run_locally(
        ["-c", "from torch_xla_pp.health import answer_ping; answer_ping()"],
        ranks=2,
        timeout_s=timeout_s,
        is_quiet=True,
        variables={"PJRT_DEVICE": "CPU"},
    )
    seconds = seconds_text(time.monotonic() - begin)
    for rank, result in enumerate(ended):
        if result.code == 0:
            continue
        late = f"did not end in {timeout_s:g} s" if result.code is None else "failed"
        lines = result.output.strip().splitlines()[-8:]
        return Check(
            name="ping",
            state="wrong",
            found="\n       ".join([f"rank {rank} {late}, after {seconds}:", *lines]),
            remedy="Mend what the checks above say; else see docs/how-to/doctor.md.",
        )
    lines = [line for line in ended[0].output.splitlines() if line.startswith(_PING)]
    answer = json.loads(lines[-1].removeprefix(_PING))
    is_in_graph = answer["transport"] == "in_graph"
    wanted = "host" in env.given("TORCH_XLA_PP_TRANSPORT").values()
    return Check(
        name="ping",
        state="ok" if is_in_graph or wanted else "note",
        found=f"2 ranks of {answer['devices']} CPU devices trained a step through "
        f"{answer['transport']} in {seconds}; a message and its answer take "
        f"{seconds_text(answer['answer_s'])}",
        remedy="" if is_in_graph or wanted else answer["why"],
    )


def answer_ping() -> None:
    """Take part in the ping, as one of its ranks."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import ScheduleGPipe

    from torch_xla_pp.launch import device
    from torch_xla_pp.runtime import PipelineStage
    from torch_xla_pp.transport import of_group

    warnings = _Messages()
    logging.getLogger("torch_xla_pp").addHandler(warnings)
    dist.init_process_group("xla_pp")
    rank, x = dist.get_rank(), torch.ones(2, 4)
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, device())
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x, losses=[])
    rounds = 20
    dist.barrier()
    begin = time.monotonic()
    for _ in range(rounds):
        if rank == 0:
            dist.send(x, 1)
            dist.recv(x, 1)
        else:
            dist.recv(x, 0)
            dist.send(x, 0)
    answer = {
        "transport": of_group(None).transport.name,
        "devices": env.num_cpu_devices(),
        "answer_s": (time.monotonic() - begin) / rounds,
        "why": " ".join(warnings.texts),
    }
    print(_PING + json.dumps(answer), flush=True)
    dist.destroy_process_group()


class _Messages(logging.Handler):
    """A handler that keeps log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
