"""Tensors that a trace captured, kept on the device and up to date."""

from collections.abc import Mapping

from torch import Tensor

from torch_xla_pp import xla_compat


class Constants:
    """Captured tensors by role, uploaded again after they were written to.

    A tensor that was captured is an operand of the programs, so that what is written
    to it in place between two calls counts, as in eager mode.
    """

    def __init__(self, sources: Mapping[str, Tensor]) -> None:
        self._sources = dict(sources)
        self._versions: dict[str, int] = {}
        self._values: dict[str, Tensor] = {}

    def values(self) -> dict[str, Tensor]:
        """Return role → value on the device."""
        for role, source in self._sources.items():
            if self._versions.get(role) != source._version:
                self._versions[role] = source._version
                self._values[role] = xla_compat.replicate(source.detach().cpu())
        return self._values
