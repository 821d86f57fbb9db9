"""Every environment variable that torch_xla_pp reads, in one place."""

import contextlib
import json
import os
import re
import socket
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeVar, get_args

ProductsName = Literal["openblas", "torch", "xla"]
_Choice = TypeVar("_Choice", bound=str)

DEFAULT_TIMEOUT_S = 600.0

# Variables by which the user configures glibc's malloc, see mallopt(3).
_MALLOC = (
    "GLIBC_TUNABLES",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)

_OWN = (
    "TORCH_XLA_PP_CHIPS",
    "TORCH_XLA_PP_DUMP_DIR",
    "TORCH_XLA_PP_PLAN",
    "TORCH_XLA_PP_PRODUCTS",
    "TORCH_XLA_PP_TIMEOUT_S",
    "TORCH_XLA_PP_TRANSPORT",
)

# Variables that a process which compiles for other devices does not inherit.
_OF_DEVICES = ("TORCH_XLA_PP_", "TPU_", "CLOUD_TPU_")

# Variables by which the user makes torch_xla analyse what it compiles.
_ANALYSIS = ("PT_XLA_DEBUG", "PT_XLA_DEBUG_LEVEL", "PT_XLA_DEBUG_FILE")
_OPEN_FILE = re.compile(r"/proc/(?P<process>\d+)/fd/\d+")


def variables() -> tuple[str, ...]:
    """Return the names of this package's own variables."""
    return _OWN


def given(*names: str) -> dict[str, str]:
    """Return which of some variables are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def unknown() -> list[str]:
    """Return the variables that are named as this package's own, but are not."""
    ours = [name for name in os.environ if name.startswith("TORCH_XLA_PP_")]
    return sorted(set(ours) - set(_OWN))


def set_defaults() -> None:
    """Set variables that torch_xla reads when it is loaded, unless the user has.

    XLA's partitioner prints one notice of its future removal per compiled program;
    errors are still printed. With `TORCH_XLA_PP_DUMP_DIR` XLA writes its programs, too.
    torch_xla reports the memory of programs only in its analyses: they go to a file
    without a name. `cpu.prepare_client` sets what CPU devices need in addition.

    Raises:
        ValueError: `TORCH_XLA_PP_PLAN` names no plan.
    """
    _keep_analyses()
    _take_devices()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    folder = dump_dir()
    if folder is not None and add_xla_flag("xla_dump_to", str(folder / "hlo")):
        add_xla_flag("xla_dump_hlo_as_text", "true")


def host_chips() -> str:
    """Return the devices of the host as stated, empty if they are not stated.

    Set by `TORCH_XLA_PP_CHIPS`.
    """
    return os.environ.get("TORCH_XLA_PP_CHIPS", "")


def local_rank() -> tuple[int, int]:
    """Return the number of this rank on its host, and of ranks there, by torchrun."""
    number, count = (
        int(os.environ.get(name, default))
        for name, default in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
    )
    return number, count


def host_name() -> str:
    """Return a text that identifies this rank's host: its number, by torchrun."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def set_missing(values: Mapping[str, str]) -> None:
    """Set variables that are not set."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def add_xla_flag(name: str, value: str) -> bool:
    """Add a flag for XLA's next client, unless the user sets it.

    Returns:
        Whether it was added.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if name in flags:
        return False
    os.environ["XLA_FLAGS"] = f"{flags} --{name}={value}".strip()
    return True


def enlarge_pool(num_threads: int) -> int:
    """Give the client that torch_xla makes next a pool of enough threads.

    Sets `PJRT_NPROC`, which determines the size: each of its two pools, one for
    programs and one for parallel work within a program, has that many threads.

    Args:
        num_threads: How many it needs at least. If it would have more, by cores or by
            the user's `PJRT_NPROC`, nothing is changed.

    Returns:
        How many it will have.
    """
    found = pool_size()
    if found < num_threads:
        os.environ["PJRT_NPROC"] = str(num_threads)
    return max(found, num_threads)


def pool_size() -> int:
    """Return how many threads a client made now gets."""
    for name in ("PJRT_NPROC", "NPROC"):
        with contextlib.suppress(KeyError, ValueError):
            return int(os.environ[name])
    return len(os.sched_getaffinity(0))


def device_kind() -> str:
    """Return the kind of devices, e.g. "CPU"; torch_xla sets it when it is loaded."""
    return os.environ.get("PJRT_DEVICE", "").partition("_")[0]


def stand_in_for(num_devices: int) -> None:
    """Give the client that torch_xla makes next CPU devices in place of others."""
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ["CPU_NUM_DEVICES"] = str(num_devices)


def num_cpu_devices() -> int:
    """Return how many devices a CPU client made now gets."""
    with contextlib.suppress(KeyError, ValueError):
        return int(os.environ["CPU_NUM_DEVICES"])
    return 1


def _keep_analyses() -> None:
    """Let torch_xla analyse each compilation, into a file that ends with the process.

    A process that this one starts inherits the variables, and makes its own file.
    """
    found = _OPEN_FILE.fullmatch(os.environ.get("PT_XLA_DEBUG_FILE", ""))
    is_ours = found is not None and found["process"] == str(os.getpid())
    is_users = found is None and any(name in os.environ for name in _ANALYSIS)
    if is_ours or is_users or not hasattr(os, "memfd_create"):
        return
    file = os.memfd_create("torch_xla_pp")
    os.environ["PT_XLA_DEBUG_LEVEL"] = "1"
    os.environ["PT_XLA_DEBUG_FILE"] = f"/proc/{os.getpid()}/fd/{file}"


def _take_devices() -> None:
    """Give this rank the number of CPU devices in the plan of `TORCH_XLA_PP_PLAN`."""
    path = os.environ.get("TORCH_XLA_PP_PLAN", "")
    if not path:
        return
    try:
        ranks = json.loads(Path(path).read_text())["ranks"]
        own = ranks[int(os.environ.get("RANK", "0")) % len(ranks)]
        os.environ.setdefault("CPU_NUM_DEVICES", str(int(own["devices"])))
    except (OSError, ValueError, LookupError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"TORCH_XLA_PP_PLAN: expected a file that PipelinePlan.to_json wrote, got "
            f"{path!r} ({type(error).__name__}: {error}). Unset it, or write a plan."
        ) from error


def analyses() -> Path | None:
    """Return where torch_xla writes its analyses of compilations, None if nowhere."""
    found = os.environ.get("PT_XLA_DEBUG_FILE", "")
    return Path(found) if found else None


def timeout_s() -> float:
    """Return how long to wait for a peer, in seconds.

    Set by `TORCH_XLA_PP_TIMEOUT_S`; the default is ten minutes.

    Raises:
        ValueError: The variable does not hold a positive number.
    """
    text = os.environ.get("TORCH_XLA_PP_TIMEOUT_S", str(DEFAULT_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if seconds <= 0:
        raise ValueError(
            f"TORCH_XLA_PP_TIMEOUT_S: expected a positive number of seconds, got "
            f"{text!r}. Unset it or set e.g. TORCH_XLA_PP_TIMEOUT_S=600."
        )
    return seconds


def transport(names: Collection[str]) -> str | None:
    """Return the transport that the user chose, None for the best one.

    Set by `TORCH_XLA_PP_TRANSPORT`.

    Args:
        names: The names of transports.

    Raises:
        ValueError: The variable names none of them.
    """
    return _choice("TORCH_XLA_PP_TRANSPORT", tuple(names))


def products() -> ProductsName | None:
    """Return the library that multiplies matrices on CPU devices, None for the best.

    Set by `TORCH_XLA_PP_PRODUCTS`.

    Raises:
        ValueError: The variable names none of them.
    """
    names: tuple[ProductsName, ...] = get_args(ProductsName)
    return _choice("TORCH_XLA_PP_PRODUCTS", names)


def openblas_kernels() -> str | None:
    """Return the kernels that the user has chosen for OpenBLAS, None for no choice.

    Set by `OPENBLAS_CORETYPE`, which OpenBLAS itself reads.
    """
    return os.environ.get("OPENBLAS_CORETYPE") or None


@contextlib.contextmanager
def openblas_choices(kernels: str | None) -> Iterator[None]:
    """Let an OpenBLAS that is loaded in the block use one thread and some kernels.

    Args:
        kernels: Its name of the kernels, unless the user has chosen others; None for
            those that it chooses itself.
    """
    wanted = {"OPENBLAS_NUM_THREADS": "1"}
    if chosen := openblas_kernels() or kernels:
        wanted["OPENBLAS_CORETYPE"] = chosen
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text


def malloc_choices() -> tuple[str, ...]:
    """Return the variables by which the user has configured malloc."""
    return tuple(name for name in _MALLOC if name in os.environ)


def _choice(name: str, choices: tuple[_Choice, ...]) -> _Choice | None:
    """Return the value of a variable, None if it is not set."""
    text = os.environ.get(name, "")
    if text and text not in choices:
        raise ValueError(
            f"{name}: expected one of {choices}, got {text!r}. Unset it to "
            "use the best one."
        )
    return choices[choices.index(text)] if text else None


def dump_dir() -> Path | None:
    """Return the folder of this rank's dumps, None if it writes none.

    Set by `TORCH_XLA_PP_DUMP_DIR`, in which each rank has a folder.
    """
    folder = os.environ.get("TORCH_XLA_PP_DUMP_DIR", "")
    rank = os.environ.get("RANK", "0")
    return Path(folder).absolute() / f"rank{rank}" if folder else None


def master_host() -> str:
    """Return the name of the job's first host, empty if the launcher gave none."""
    return os.environ.get("MASTER_ADDR", "")


def is_rank() -> bool:
    """Return whether a launcher has started this process as a rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch() -> str:
    """Return the number of this launch of the job, by torchrun.

    When torchrun restarts ranks, as one has failed or hosts have joined or left, it
    keeps the store: the new ranks find the values that the ranks before have set there.
    """
    size, attempt = (
        os.environ.get(name, "0")
        for name in ("WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    )
    return f"{size} ranks, attempt {attempt}"


def tpu_library() -> Path | None:
    """Return the library for TPUs that `TPU_LIBRARY_PATH` names, None if it is not set.

    torch_xla reads that variable, too.
    """
    found = os.environ.get("TPU_LIBRARY_PATH", "")
    return Path(found).absolute() if found else None


def for_compiler(folder: str) -> dict[str, str]:
    """Return the environment of a process that compiles for devices that are not here.

    Flags for the XLA of this process would end it, and chips of this process are not
    its own. libtpu would query the cloud's metadata server for minutes, and take a
    lock, as if it used the host's chips, that lets no second libtpu run.

    Args:
        folder: Folder for its files, such as logs.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != "XLA_FLAGS" and not name.startswith(_OF_DEVICES)
    }
    return {
        **kept,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TMPDIR": folder,
    }


def cache_dir() -> Path:
    """Return the folder in which facts about installed libraries are cached."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torch_xla_pp"
