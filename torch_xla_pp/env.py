"""Every environment variable that torch_xla_pp reads, in one place."""

import contextlib
import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal, TypeVar, get_args

ProductsName = Literal["torch", "xla"]
_Choice = TypeVar("_Choice", bound=str)

DEFAULT_TIMEOUT_S = 600.0

# Variables by which the user tells glibc's malloc what to do, see mallopt(3).
_MALLOC = (
    "GLIBC_TUNABLES",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)

_OWN = (
    "TORCH_XLA_PP_DUMP_DIR",
    "TORCH_XLA_PP_PLAN",
    "TORCH_XLA_PP_PRODUCTS",
    "TORCH_XLA_PP_TIMEOUT_S",
    "TORCH_XLA_PP_TRANSPORT",
)

# Variables by which the user tells torch_xla to analyse what it compiles.
_ANALYSIS = ("PT_XLA_DEBUG", "PT_XLA_DEBUG_LEVEL", "PT_XLA_DEBUG_FILE")
_OPEN_FILE = re.compile(r"/proc/(?P<process>\d+)/fd/\d+")


def variables() -> tuple[str, ...]:
    """Return the names of this package's own variables."""
    return _OWN


def given(*names: str) -> dict[str, str]:
    """Return those of some variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def unknown() -> list[str]:
    """Return the variables that are named as this package's own, but are not."""
    ours = [name for name in os.environ if name.startswith("TORCH_XLA_PP_")]
    return sorted(set(ours) - set(_OWN))


def set_defaults() -> None:
    """Set what torch_xla reads when it is loaded, unless the user has set it.

    XLA's partitioner prints one notice of its future removal per compiled program;
    errors are still printed. With `TORCH_XLA_PP_DUMP_DIR` XLA writes its programs, too.
    torch_xla tells what memory programs need in its analyses alone: they go to a file
    without a name. What CPU devices need besides is set by `cpu.prepare_client`.

    Raises:
        ValueError: `TORCH_XLA_PP_PLAN` names no plan.
    """
    _keep_analyses()
    _take_devices()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    folder = dump_dir()
    if folder is not None and add_xla_flag("xla_dump_to", str(folder / "hlo")):
        add_xla_flag("xla_dump_hlo_as_text", "true")


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
    """Let the client that torch_xla makes next have a pool of enough threads.

    Sets `PJRT_NPROC`, which it takes the size from: each of its two pools, one for
    programs and one for what a program does in parallel, has as many threads.

    Args:
        num_threads: How many it needs at least. More are left as they are, by cores
            or as the user has set `PJRT_NPROC`.

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


def num_cpu_devices() -> int:
    """Return how many devices a CPU client made now gets."""
    with contextlib.suppress(KeyError, ValueError):
        return int(os.environ["CPU_NUM_DEVICES"])
    return 1


def _keep_analyses() -> None:
    """Let torch_xla analyse each compilation, into a file that ends with the process.

    A process that this one starts inherits the variables, and makes a file of its own.
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
    """Let this rank have as many CPU devices as `TORCH_XLA_PP_PLAN` has planned."""
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
    """Return the transport that the user asks for, None for the best there is.

    Set by `TORCH_XLA_PP_TRANSPORT`.

    Args:
        names: Those that there are.

    Raises:
        ValueError: The variable names none of them.
    """
    return _choice("TORCH_XLA_PP_TRANSPORT", tuple(names))


def products() -> ProductsName:
    """Return whose library multiplies matrices on a CPU device, if there is a choice.

    Set by `TORCH_XLA_PP_PRODUCTS`; the default is `torch`.

    Raises:
        ValueError: The variable holds anything else than `torch` or `xla`.
    """
    names: tuple[ProductsName, ...] = get_args(ProductsName)
    return _choice("TORCH_XLA_PP_PRODUCTS", names) or "torch"


def malloc_choices() -> tuple[str, ...]:
    """Return the variables by which the user has told malloc what to do."""
    return tuple(name for name in _MALLOC if name in os.environ)


def _choice(name: str, choices: tuple[_Choice, ...]) -> _Choice | None:
    """Return what a variable holds, None if it is not set."""
    text = os.environ.get(name, "")
    if text and text not in choices:
        raise ValueError(
            f"{name}: expected one of {choices}, got {text!r}. Unset it to "
            "use the best one."
        )
    return choices[choices.index(text)] if text else None


def dump_dir() -> Path | None:
    """Return where this rank writes what it makes, None if it does not.

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
    """Return what tells this launch of the job from others, as torchrun numbers them.

    When torchrun starts ranks again, as one has failed or hosts have come or gone, it
    keeps the store: what the ranks before have set there is found by those after them.
    """
    size, attempt = (
        os.environ.get(name, "0")
        for name in ("WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    )
    return f"{size} ranks, attempt {attempt}"


def cache_dir() -> Path:
    """Return where facts about installed libraries are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torch_xla_pp"
