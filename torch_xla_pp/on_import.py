"""The changes that importing the package makes in its process.

All of them are listed in docs/reference/environment.md. Nothing here imports torch,
which the command line does not need.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch_xla_pp import env

if TYPE_CHECKING:
    from torch_xla_pp.transport import XlaPpProcessGroup

BACKEND = "xla_pp"


def prepare_process() -> None:
    """Set variables that torch_xla reads when loaded, and register the backend."""
    env.set_defaults()
    if env.host_chips():
        take_own_chips()
    if not _has_client():
        once_imported("torch_xla", prepare_cpu)
    once_imported("torch.distributed", register_backend)


def take_own_chips() -> None:
    """Let this rank's client see only its own chips of the host.

    Raises:
        ValueError: The ranks cannot share the host's chips.
    """
    from torch_xla_pp.accelerators import own_chips

    env.set_missing(own_chips(env.host_chips(), *env.local_rank()))


def prepare_cpu() -> None:
    """Set what XLA reads as it makes a client, if that will be one for CPU devices.

    torch_xla chooses the kind of devices when it is loaded; the program may make the
    client itself right after that.
    """
    from torch_xla_pp import cpu

    cpu.prepare_client()


def _has_client() -> bool:
    """Return whether there is a client, which has then read all settings."""
    if "torch_xla" not in sys.modules:
        return False
    from torch_xla_pp import xla_compat

    return xla_compat.has_client()


def register_backend() -> None:
    """Register "xla_pp" with torch.distributed, once."""
    from torch.distributed import Backend

    if BACKEND not in Backend.backend_list:
        Backend.register_backend(BACKEND, _make_group, devices=["cpu", "xla"])


def _make_group(*args: Any) -> "XlaPpProcessGroup":
    from torch_xla_pp.transport import XlaPpProcessGroup

    return XlaPpProcessGroup(*args)


def once_imported(name: str, act: Callable[[], None]) -> None:
    """Act now if a module has been imported, else as soon as it is."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Watch(name, act))


class _Watch(MetaPathFinder):
    """A finder that finds nothing, but acts when one module has been imported.

    It leaves the path of finders before it does.
    """

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of the other finders, which acts after the module's code."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            self._act()

        # On the loader itself, which is also asked for the module's source.
        setattr(spec.loader, "exec_module", execute_and_act)  # noqa: B010
        return spec
