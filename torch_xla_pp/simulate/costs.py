"""The costs of a model's stages: times, messages, and saved bytes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch_xla_pp.schedule import Kind, chain_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Values that a stage makes for each microbatch, and the stages that use them.

    Args:
        producer: The stage that makes them.
        consumers: The stages that use them.
        num_bytes: Their size.
        has_gradient: Whether each consumer sends gradients of that size back.
        made_at: The part of the producer's F after which they are there.
        graded_at: For each consumer the part of its B or I after which its gradients
            are there; () for the end.

    Raises:
        ValueError: The size is negative, or a part is not from 0 to 1.
    """

    producer: int
    consumers: tuple[int, ...]
    num_bytes: int = 0
    has_gradient: bool = True
    made_at: float = 1.0
    graded_at: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.num_bytes < 0:
            raise ValueError(
                f"flow from stage {self.producer}: expected a size of at least 0 "
                f"bytes, got {self.num_bytes}. Correct it."
            )
        if not all(0 <= part <= 1 for part in (self.made_at, *self.graded_at)):
            raise ValueError(
                f"flow from stage {self.producer}: expected parts of actions from 0 to "
                f"1, got {self.made_at} and {self.graded_at}. Correct them."
            )
        if self.graded_at and len(self.graded_at) != len(self.consumers):
            raise ValueError(
                f"flow from stage {self.producer}: expected a part for each of "
                f"{len(self.consumers)} consumers, got {len(self.graded_at)}. Correct "
                "it."
            )

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Return pairs of the producer and each consumer."""
        return tuple((self.producer, consumer) for consumer in self.consumers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """The times, messages and saved bytes of stages for one microbatch.

    Args:
        seconds: Stage and kind of action → its time, without waiting.
        flows: The values that stages make for each other.
        saved_bytes: Stage → bytes kept from its F to its B or I; empty if that is
            unknown.
        passed_bytes: Stage → bytes kept from its I to its W; those of `saved_bytes`
            where it has no entry.
        final_s: Stage → its time after the last action of a step: sums of gradients,
            and the optimizer. It is not part of a `Timeline`.
        samples: Measured times whose means are in `seconds`, from which
            `expected_step_s` draws; empty if they are not known.

    Raises:
        ValueError: A time is negative.
    """

    seconds: Mapping[tuple[int, Kind], float]
    flows: tuple[Flow, ...]
    saved_bytes: Mapping[int, int] = field(default_factory=dict)
    passed_bytes: Mapping[int, int] = field(default_factory=dict)
    final_s: Mapping[int, float] = field(default_factory=dict)
    samples: Mapping[tuple[int, Kind], tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        faulty = {f"{s}{k}": t for (s, k), t in self.seconds.items() if not t >= 0}
        faulty |= {f"end of {s}": t for s, t in self.final_s.items() if not t >= 0}
        sampled = ((key, t) for key, found in self.samples.items() for t in found)
        faulty |= {f"sample of {s}{k}": t for (s, k), t in sampled if not t >= 0}
        if faulty:
            raise ValueError(
                "costs: expected times of at least 0 s, got "
                + ", ".join(f"{name}: {time}" for name, time in faulty.items())
                + ". Correct them."
            )

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Return each pair of a stage and one that uses its values, in order."""
        return tuple(sorted({edge for flow in self.flows for edge in flow.edges}))

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward_s: float = 1.0,
        input_s: float = 1.0,
        weight_s: float = 1.0,
        num_bytes: int = 0,
        saved_bytes: int = 0,
    ) -> "Costs":
        """Return the costs of equal stages, each of which uses the one before.

        Args:
            num_stages: Number of stages.
            forward_s: Time of F.
            input_s: Time of I.
            weight_s: Time of W; B takes as long as I and W.
            num_bytes: Size of the values that a stage sends to the next one.
            saved_bytes: Size of the values that a stage keeps.
        """
        stages = range(num_stages)
        times = [(forward_s, input_s, weight_s)] * num_stages
        return cls(
            seconds=stage_seconds(times),
            flows=chain_flows(num_stages, num_bytes),
            saved_bytes=dict.fromkeys(stages, saved_bytes) if saved_bytes else {},
        )


def stage_seconds(
    times: Iterable[tuple[float, float, float]],
) -> dict[tuple[int, Kind], float]:
    """Return the times of the actions of stages.

    Args:
        times: For each stage the times of F, I and W; B takes as long as I and W.
    """
    seconds: dict[tuple[int, Kind], float] = {}
    for stage, (forward_s, input_s, weight_s) in enumerate(times):
        seconds[stage, "F"] = forward_s
        seconds[stage, "B"] = input_s + weight_s
        seconds[stage, "I"] = input_s
        seconds[stage, "W"] = weight_s
    return seconds


def chain_flows(num_stages: int, num_bytes: int = 0) -> tuple[Flow, ...]:
    """Return the flows of stages each of which uses the one before."""
    return edge_flows(chain_of(num_stages), num_bytes)


def edge_flows(edges: Iterable[tuple[int, int]], num_bytes: int) -> tuple[Flow, ...]:
    """Return a flow for each pair of a stage and one that uses its values."""
    return tuple(
        Flow(producer=producer, consumers=(consumer,), num_bytes=num_bytes)
        for producer, consumer in edges
    )
