"""A compiler's answers for a stage's programs, on one device of its rank."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch_xla_pp.accelerators import CompiledProgram, ProgramTime
from torch_xla_pp.simulate import Flow
from torch_xla_pp.text import seconds_text

_MIB = 2**20
_INDENT = "  "
LOSS, REDUCTION, GATHERING = "loss", "gradient reduction", "gathering of weights"
# The programs that an action runs, one after the other.
_OF_ACTION: Mapping[str, tuple[str, ...]] = {
    "F": ("forward", "inference", LOSS),
    "B": ("backward",),
    "I": ("backward input",),
    "W": ("backward weight",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FitCollective:
    """Exchanges of one kind between the devices of a rank.

    Args:
        kind: Its name in HLO.
        axes: Mesh axes along which devices exchange, None for other groups.
        count: How many instructions there are.
        num_bytes: Bytes of their results, on one device.
        num_asynchronous: During how many of them the device computes.
    """

    kind: str
    axes: tuple[str, ...] | None
    count: int
    num_bytes: int
    num_asynchronous: int

    def __str__(self) -> str:
        axes = "other groups" if self.axes is None else ", ".join(self.axes)
        return (
            f"{self.count} {self.kind} over {axes}, {mib_text(self.num_bytes)}, "
            f"{self.num_asynchronous} asynchronous"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueBytes:
    """The bytes of a program's values on a device, by their shapes and shardings.

    Args:
        arguments: All arguments.
        argument_padding: Further bytes, to fill up the tiles of the device's layout.
        outputs: All results.
        output_padding: Likewise, and for the table of several results.
    """

    arguments: int
    argument_padding: int
    outputs: int
    output_padding: int

    def agrees(self, compiled: CompiledProgram) -> bool:
        """Return whether the compiler counts the same, to the byte."""
        found = compiled.num_bytes
        return (
            found is not None
            and found.arguments == self.arguments + self.argument_padding
            and found.outputs == self.outputs + self.output_padding
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramFit:
    """One program of a stage, compiled.

    Args:
        name: What it does.
        compiled: The compiler's answer; with an error if it could not be tried.
        received_bytes: Bytes of arguments that its rank does not hold anyway.
        collectives: Exchanges between the rank's devices, by kind and axes.
        values: The bytes of its values by our own count, None if it does not compile.
        time: Its time, None likewise.
        surprises: Exchanges that nobody asked for, and what to write instead.
    """

    name: str
    compiled: CompiledProgram
    received_bytes: int = 0
    collectives: tuple[FitCollective, ...] = ()
    values: ValueBytes | None = None
    time: ProgramTime | None = None
    surprises: tuple[str, ...] = ()

    @property
    def extra_bytes(self) -> int:
        """Return the bytes that a run needs beside its arguments."""
        found = self.compiled.num_bytes
        return 0 if found is None else found.extra

    @property
    def held_bytes(self) -> int:
        """Return the bytes that a run needs beside those that its rank holds anyway."""
        padding = 0 if self.values is None else self.values.argument_padding
        return self.received_bytes + self.extra_bytes + padding

    def lines(self) -> Iterator[str]:
        """Yield it as text."""
        found = self.compiled.num_bytes
        if found is None:
            yield f"{self.name}: DOES NOT COMPILE"
            yield from (f"{_INDENT}{x}" for x in self.compiled.error.splitlines())
            return
        yield (
            f"{self.name}: arguments {mib_text(found.arguments)}, outputs "
            f"{mib_text(found.outputs)} ({mib_text(found.aliased)} in their place), "
            f"temporaries {mib_text(found.temporaries)}, "
            f"{self.compiled.flops / 1e9:,.2f} GFLOP"
        )
        if self.time is not None:
            yield f"{_INDENT}{self._time_text(self.time)}"
        yield from (f"{_INDENT}{collective}" for collective in self.collectives)
        yield from (f"{_INDENT}SURPRISE: {text}" for text in self.surprises)

    def _time_text(self, time: ProgramTime) -> str:
        compiled = self.compiled
        basis = f"{compiled.cycles:,} cycles of {compiled.num_timed} instructions"
        if compiled.num_untimed:
            basis += f", {compiled.num_untimed} without cycles"
        exchanges = [
            f"{seconds_text(seconds)} of collectives {name}"
            for seconds, name in (
                (time.exchange_s, "waited for"),
                (time.hidden_s, "beside"),
            )
            if seconds
        ]
        return (
            f"{seconds_text(time.seconds)}: "
            + ", ".join([f"computes {seconds_text(time.compute_s)}", *exchanges])
            + f"; roofline {seconds_text(time.roofline_s)} ({basis})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFit:
    """A stage, on one device of its rank.

    Args:
        index: Index of the stage.
        parameter_bytes: Its parameters.
        buffer_bytes: Its buffers, and tensors that it reads from elsewhere.
        gradient_bytes: The sums of its gradients.
        optimizer_bytes: The optimizer's state.
        saved_bytes: What is kept for a microbatch from F until B or I.
        passed_bytes: What is kept for it from I until W.
        programs: Its programs.
        flows: The values that it makes for other stages.
    """

    index: int
    parameter_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    passed_bytes: int
    programs: tuple[ProgramFit, ...]
    flows: tuple[Flow, ...] = ()

    @property
    def state_bytes(self) -> int:
        """Return the bytes that it holds all the time."""
        fixed = self.parameter_bytes + self.buffer_bytes
        return fixed + self.gradient_bytes + self.optimizer_bytes

    @property
    def faults(self) -> tuple[ProgramFit, ...]:
        """Return the programs that do not compile."""
        return tuple(found for found in self.programs if found.compiled.error)

    def of_action(self, kind: str) -> tuple[ProgramFit, ...]:
        """Return the programs that an action runs."""
        return tuple(p for p in self.programs if p.name in _OF_ACTION[kind])

    def seconds(self, kind: str) -> float:
        """Return the time of an action's programs, as far as they compile."""
        return _seconds(self.of_action(kind))

    @property
    def once_s(self) -> float:
        """Return the time of the programs that run once a step."""
        return _seconds(p for p in self.programs if p.name in (REDUCTION, GATHERING))

    @property
    def updated_bytes(self) -> int:
        """Return the bytes that an optimizer reads and writes."""
        return 2 * (self.parameter_bytes + self.optimizer_bytes) + self.gradient_bytes

    def kept_by(self, kind: str) -> int:
        """Return how many more bytes are kept after an action than before it."""
        changes = {
            "F": self.saved_bytes,
            "B": -self.saved_bytes,
            "I": self.passed_bytes - self.saved_bytes,
            "W": -self.passed_bytes,
        }
        return changes[kind]

    def lines(self) -> Iterator[str]:
        """Yield it as text."""
        yield (
            f"stage {self.index}: parameters {mib_text(self.parameter_bytes)}, buffers "
            f"{mib_text(self.buffer_bytes)}, gradients "
            f"{mib_text(self.gradient_bytes)}, optimizer "
            f"{mib_text(self.optimizer_bytes)}, saved of a microbatch "
            f"{mib_text(self.saved_bytes)}"
            + (f", {mib_text(self.passed_bytes)} from I to W" * (self.passed_bytes > 0))
        )
        for found in self.programs:
            yield from (f"{_INDENT}{line}" for line in found.lines())


def _seconds(programs: Iterable[ProgramFit]) -> float:
    return sum(p.time.seconds for p in programs if p.time is not None)


def mib_text(num_bytes: int) -> str:
    """Write a size in MiB."""
    return f"{num_bytes / _MIB:,.1f} MiB"
