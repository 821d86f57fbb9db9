"""Where the time goes until the first step is done.

A *phase* is one kind of work on the way from a model to compiled programs. Each is
done in a block of its own, in the thread that drives the pipeline: "trace" and "split"
in `pipeline`, "joint graph", "partition", "lowering" and "XLA" in the first step of
each kind, and "other ranks" wherever this one waits for what another has to tell.
A block inside of another one counts for the inner phase alone.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

REST = "rest"
"""What is in no phase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseCost:
    """What a phase has cost so far.

    Args:
        wall_s: Time by the clock.
        thread_s: Processor time of the thread that drives the pipeline.
        process_s: Processor time of all threads of the process.
        num_blocks: How often the phase was begun.
    """

    wall_s: float = 0.0
    thread_s: float = 0.0
    process_s: float = 0.0
    num_blocks: int = 0


class Phases:
    """What each phase has cost in the block of `note_phases`."""

    def __init__(self) -> None:
        self._begun = [REST]
        self._costs = {REST: PhaseCost(num_blocks=1)}
        self._last = _now()

    @property
    def costs(self) -> Mapping[str, PhaseCost]:
        """Return the cost of each phase so far, by name, as they were begun first.

        "rest" is what was in no phase. Those that have not ended count, too.
        """
        self._charge()
        return dict(self._costs)

    def begin(self, name: str) -> None:
        """Let what follows count for a phase."""
        self._charge()
        self._begun.append(name)
        self._add(name, (0.0, 0.0, 0.0), num_blocks=1)

    def end(self) -> None:
        """Let what follows count for the phase around the present one."""
        self._charge()
        self._begun.pop()

    def _charge(self) -> None:
        now = _now()
        wall, thread, process = (x - y for x, y in zip(now, self._last, strict=True))
        self._add(self._begun[-1], (wall, thread, process))
        self._last = now

    def _add(
        self, name: str, seconds: tuple[float, float, float], num_blocks: int = 0
    ) -> None:
        old, (wall, thread, process) = self._costs.get(name, PhaseCost()), seconds
        self._costs[name] = PhaseCost(
            wall_s=old.wall_s + wall,
            thread_s=old.thread_s + thread,
            process_s=old.process_s + process,
            num_blocks=old.num_blocks + num_blocks,
        )


_noted: ContextVar[Phases | None] = ContextVar("noted_phases", default=None)


@contextlib.contextmanager
def note_phases() -> Iterator[Phases]:
    """Note what each phase costs in the block; of the calling thread's pipelines.

    Yields:
        The costs, which may be read at any time.

    Example:
        >>> with note_phases() as phases:
        ...     schedule.step(x)
        >>> print(phases.costs["XLA"].process_s)
    """
    phases = Phases()
    token = _noted.set(phases)
    try:
        yield phases
    finally:
        _noted.reset(token)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Let the block count for a phase, if phases are noted."""
    phases = _noted.get()
    if phases is None:
        yield
        return
    phases.begin(name)
    try:
        yield
    finally:
        phases.end()


def _now() -> tuple[float, float, float]:
    return time.perf_counter(), time.thread_time(), time.process_time()
