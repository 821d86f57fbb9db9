"""1F1B for stages that form a directed acyclic graph.

Terms: an *edge* (producer, consumer) says that a stage uses values of another. The
*depth* of a stage is the number of stages on the longest path from it to a stage
that nothing uses, both included. A microbatch is *in flight* in a stage from its
forward to its backward.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from torch_xla_pp.schedule.action import Action
from torch_xla_pp.schedule.builders.counts import check_counts
from torch_xla_pp.schedule.edges import (
    StagePair,
    carriers_of,
    check_edges,
    depths_of,
    neighbours_of,
)
from torch_xla_pp.schedule.schedule import Schedule


def dag_1f1b(
    edges: Iterable[StagePair], placement: Mapping[int, int], num_microbatches: int
) -> Schedule:
    """Run forwards as far ahead as the depth of a stage allows; backwards go first.

    Branches of the model that do not depend on each other run at the same time if
    they are on different ranks. As many microbatches are in flight in a stage as it
    has depth, however wide the graph is. On a chain with one stage per rank it is
    1F1B. The order comes from a simulation in which every action takes one unit of
    time and every rank runs what it can; of the actions that a rank can run, it takes
    a backward before a forward, then the lowest microbatch, then the stage next to
    the end (backward) or to the start (forward).

    Source: Jeon et al., "GraphPipe: Improving Performance and Scalability of DNN
    Training with Graph Pipeline Parallelism", ASPLOS 2025, section 6.

    Args:
        edges: Pairs (producer, consumer).
        placement: Stage → rank.
        num_microbatches: Number of microbatches.

    Raises:
        ValueError: An edge does not lead to a higher stage, or a stage or a rank is
            missing from the placement.
    """
    check_counts("dag_1f1b", num_microbatches=num_microbatches)
    _check_placement(placement)
    edges = sorted(set(edges))
    check_edges("dag_1f1b", edges, len(placement))
    simulation = _simulation(edges, placement, num_microbatches)
    stages_of: list[list[int]] = [[] for _ in set(placement.values())]
    for stage, rank in sorted(placement.items()):
        stages_of[rank].append(stage)
    rows: list[list[Action]] = [[] for _ in stages_of]
    while not simulation.is_done:
        chosen = [simulation.choose(stages) for stages in stages_of]
        for row, action in zip(rows, chosen, strict=True):
            if action is not None:
                row.append(action)
                simulation.finish(action)
    return Schedule(actions=tuple(map(tuple, rows)))


@dataclass(kw_only=True, slots=True)
class _Simulation:
    """The numbers of forwards and backwards that each stage has finished.

    Every stage takes the microbatches in order, so that the counts say all.
    """

    num_microbatches: int
    producers: Sequence[Sequence[int]]
    consumers: Sequence[Sequence[int]]
    carriers: Sequence[Sequence[int]]
    depths: Sequence[int]
    forwards: list[int]
    backwards: list[int]

    @property
    def is_done(self) -> bool:
        return min(self.backwards) == self.num_microbatches

    def choose(self, stages: Sequence[int]) -> Action | None:
        """Return what a rank with these stages runs next, None if it has to wait."""
        backwards = [s for s in stages if self._can_run_backward(s)]
        if backwards:
            stage = min(backwards, key=lambda s: (self.backwards[s], -s))
            return Action(stage=stage, kind="B", microbatch=self.backwards[stage])
        forwards = [s for s in stages if self._can_run_forward(s)]
        if forwards:
            stage = min(forwards, key=lambda s: (self.forwards[s], s))
            return Action(stage=stage, kind="F", microbatch=self.forwards[stage])
        return None

    def finish(self, action: Action) -> None:
        """Count an action that was chosen."""
        counts = self.forwards if action.kind == "F" else self.backwards
        counts[action.stage] += 1

    def _can_run_backward(self, stage: int) -> bool:
        microbatch = self.backwards[stage]
        return self.forwards[stage] > microbatch and all(
            self.backwards[consumer] > microbatch for consumer in self.consumers[stage]
        )

    def _can_run_forward(self, stage: int) -> bool:
        microbatch = self.forwards[stage]
        in_flight = microbatch - self.backwards[stage]
        return (
            microbatch < self.num_microbatches
            and in_flight < self.depths[stage]
            and all(self.forwards[p] > microbatch for p in self.producers[stage])
            and all(self.forwards[c] > microbatch for c in self.carriers[stage])
        )


def _simulation(
    edges: Sequence[StagePair], placement: Mapping[int, int], num_microbatches: int
) -> _Simulation:
    """Make a simulation in which nothing has run."""
    num_stages = len(placement)
    consumers = neighbours_of(edges, num_stages)
    carriers = carriers_of(_possible_values(consumers), placement)
    return _Simulation(
        num_microbatches=num_microbatches,
        producers=neighbours_of([(c, p) for p, c in edges], num_stages),
        consumers=consumers,
        carriers=neighbours_of([(o, c) for c, o in carriers], num_stages),
        depths=depths_of(edges, num_stages),
        forwards=[0] * num_stages,
        backwards=[0] * num_stages,
    )


def _possible_values(
    consumers: Sequence[Sequence[int]],
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield any two consumers of a stage: edges do not say which use one value."""
    for producer, users in enumerate(consumers):
        for pair in combinations(users, 2):
            yield producer, pair


def _check_placement(placement: Mapping[int, int]) -> None:
    stages, ranks = sorted(placement), sorted(set(placement.values()))
    for what, found in (("stages", stages), ("ranks", ranks)):
        if found != list(range(len(found))) or not found:
            raise ValueError(
                f"dag_1f1b: expected a placement of {what} that count from 0 without "
                f"gaps, got {what} {found}. Give every stage a rank and every rank a "
                "stage."
            )
