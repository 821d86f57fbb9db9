"""What the stages of a pipeline compute and exchange, on one device."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from torch_xla_pp.advice.exchanges import Exchange
from torch_xla_pp.advice.machine import PIPELINE, REPLICAS, Machine

STEP = "step"
# Name of a program → the action that runs it; the others run once a step.
_WHEN: Mapping[str, str] = {
    "forward": "F",
    "loss": "F",
    "backward": "B",
    "forward and backward": "B",
    "forward and backward input": "I",
    "backward input": "I",
    "backward weight": "W",
}
# Programs that together train a microbatch; a stage may have run several of these.
_TRAINING = (
    {"forward", "backward"},
    {"forward", "backward input", "backward weight"},
    {"forward and backward"},
    {"forward and backward input", "backward weight"},
)
# The actions during which an exchange runs that happens once a step.
_BACKWARD = ("B", "I", "W")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLoad:
    """What a stage does for one microbatch, on one device.

    Args:
        stage: Index of the stage.
        flops: "F", "B", "I", "W" → operations of products; a stage has B, or I and W.
        accessed_bytes: The same → bytes of its memory, empty if not known.
        exchanges: What it exchanges, for a microbatch and at the end of a step.
    """

    stage: int
    flops: Mapping[str, float]
    accessed_bytes: Mapping[str, float] = field(default_factory=dict)
    exchanges: tuple[Exchange, ...] = ()

    def over(self, axis: str) -> tuple[Exchange, ...]:
        """Return the exchanges along one axis."""
        return tuple(found for found in self.exchanges if found.axis == axis)

    def work(self, exchanges: tuple[Exchange, ...], num_microbatches: int) -> float:
        """Return the FLOP of a step's actions during which these exchanges run.

        An exchange that happens once a step runs during all backwards.
        """
        during: set[str] = set()
        for exchange in exchanges:
            during |= {*_BACKWARD} if exchange.when == STEP else {exchange.when}
        return num_microbatches * sum(self.flops.get(kind, 0.0) for kind in during)


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineLoad:
    """What all stages do, and how often.

    Args:
        stages: Some or all stages.
        num_microbatches: Microbatches of a step.
        num_ranks: Ranks of the pipeline.
        stages_per_rank: Stages of each.
        mesh: Axes of a rank's devices → their sizes.
        strategies: Axis → what it is for: "dp", "fsdp", "fsdp_once", "tp",
            "tensor_sequence", "cp", "sp" or "ep".
        machine: The devices, None if none are given.
    """

    stages: tuple[StageLoad, ...]
    num_microbatches: int
    num_ranks: int
    stages_per_rank: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    strategies: Mapping[str, str] = field(default_factory=dict)
    machine: Machine | None = None

    def axes(self) -> Iterator[str]:
        """Yield the axes with exchanges along them, those within a rank first."""
        found = {e.axis for load in self.stages for e in load.exchanges}
        outer = {REPLICAS: 1, PIPELINE: 2}
        yield from sorted(found, key=lambda axis: (outer.get(axis, 0), axis))


def when_of(program: str) -> str:
    """Return when a program of a stage runs."""
    return _WHEN.get(program, STEP)


def counted_once(programs: Collection[str]) -> set[str]:
    """Return those of a stage's programs that together do all of its work once."""
    known = {*programs}
    chosen = next((names for names in _TRAINING if names <= known), known)
    return chosen | known.difference(*_TRAINING)


def moved_in_step(exchange: Exchange, num_microbatches: int) -> float:
    """Return what a device sends in a step for an exchange."""
    times = 1 if exchange.when == STEP else num_microbatches
    return times * exchange.moved_bytes
