"""How long a compiled program takes, by its compiler's cycles and by rooflines."""

from dataclasses import dataclass

from torch_xla_pp.accelerators.compiled_program import CompiledProgram
from torch_xla_pp.accelerators.link_times import exchange_s
from torch_xla_pp.accelerators.topologies import Slice


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramTime:
    """The time that a program is expected to take on a device; nothing was measured.

    Args:
        compute_s: Cycles of the compiler at the device's clock; what has no cycles
            is charged with its results, read and written once.
        exchange_s: Exchanges during which the device waits.
        hidden_s: Exchanges during which it computes.
        roofline_s: The larger one of FLOPs at the peak and bytes at the memory's
            bandwidth, for comparison.
    """

    compute_s: float
    exchange_s: float
    hidden_s: float
    roofline_s: float

    @classmethod
    def of(cls, program: CompiledProgram, topology: Slice) -> "ProgramTime":
        """Return what a program takes on chips.

        A program for which the compiler states no cycles is charged with its roofline.
        """
        chip = topology.chip
        roofline_s = max(
            program.flops / chip.flops_per_s,
            program.accessed_bytes / chip.memory_bytes_per_s,
        )
        untimed_s = 2 * program.untimed_bytes / chip.memory_bytes_per_s
        compute_s = program.cycles / chip.clock_hz + untimed_s
        times = [
            (found.is_asynchronous, found.times * exchange_s(found, topology))
            for found in program.collectives
        ]
        return cls(
            compute_s=compute_s if program.num_timed else roofline_s,
            exchange_s=sum(seconds for is_hidden, seconds in times if not is_hidden),
            hidden_s=sum(seconds for is_hidden, seconds in times if is_hidden),
            roofline_s=roofline_s,
        )

    @property
    def seconds(self) -> float:
        """Return the whole time; hidden exchanges count where they take longer."""
        return self.exchange_s + max(self.compute_s, self.hidden_s)
