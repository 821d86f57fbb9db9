"""Weights that a step gathers once, for all of its programs."""

from collections.abc import Mapping

from torch import Tensor, nn

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import Function, Program, ProgramSpec, ValueSizes, copied


class GatheredWeights:
    """Weights that a step gathers once, for all of its programs.

    MaxText calls this `pipeline_fsdp_ag_once`. The copies are made by one program at
    the first use in a step, and dropped at its end.

    Args:
        used: Role of a weight → its sharding in use.

    Attributes:
        program: Makes the copies; None if there are none.
        num_bytes: Bytes of the last step's copies on one device.
    """

    def __init__(self, used: Mapping[str, xla_compat.OpSharding]) -> None:
        self._roles = list(used)
        self._values: dict[str, Tensor] = {}
        self._sizes = ValueSizes()
        self.num_bytes = 0
        self.program: Program | None = None
        if used:
            pins = {copied(role): sharding for role, sharding in used.items()}
            function = Function(
                name="gathering of weights",
                module=_Copies(),
                inputs=tuple(used),
                outputs=tuple(pins),
            )
            self.program = Program(ProgramSpec(function=function, pins=pins))

    def values(self, fixed: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the stage's values with the copies in place; makes them if needed."""
        if self.program is not None and not self._values:
            made = self.program(fixed)
            self._values = {role: made[copied(role)] for role in self._roles}
            self.num_bytes = self._sizes.of(self._values)
        return {**fixed, **self._values}

    def drop(self) -> None:
        """Drop the copies; they are freed once the programs that read them have run."""
        self._values = {}


class _Copies(nn.Module):
    """Copies of values, which are resharded."""

    def forward(self, *values: Tensor) -> list[Tensor]:
        return [value * 1 for value in values]
