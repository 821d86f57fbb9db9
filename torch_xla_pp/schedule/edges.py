"""Facts about stages that follow from the edges between them.

An edge is a pair (producer, consumer) of stages. A producer is always the lower one.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

StagePair = tuple[int, int]


def chain_of(num_stages: int) -> tuple[StagePair, ...]:
    """Return the edges of stages each of which uses the one before."""
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


def check_edges(user: str, edges: Iterable[StagePair], num_stages: int) -> None:
    """Refuse edges that do not lead from a stage to a higher one.

    Raises:
        ValueError: There are some; `user` and all of them are named.
    """
    faulty = [f"{p}->{c}" for p, c in edges if not 0 <= p < c < num_stages]
    if faulty:
        raise ValueError(
            f"{user}: expected edges from a stage to a higher one of 0.."
            f"{num_stages - 1}, got {', '.join(faulty)}. Number the stages in the "
            "order of the model's data flow."
        )


def neighbours_of(edges: Iterable[StagePair], num_stages: int) -> list[list[int]]:
    """Return for each stage the ends of the edges that begin at it."""
    found: list[list[int]] = [[] for _ in range(num_stages)]
    for first, second in edges:
        found[first].append(second)
    return found


def depths_of(edges: Iterable[StagePair], num_stages: int) -> list[int]:
    """Return the number of stages on the longest path from each stage to an end."""
    consumers = neighbours_of(edges, num_stages)
    depths = [1] * num_stages
    for stage in reversed(range(num_stages)):
        depths[stage] += max((depths[c] for c in consumers[stage]), default=0)
    return depths


def givers_of(
    producer: int,
    consumers: Iterable[int],
    placement: Mapping[int, int] | Sequence[int],
) -> dict[int, int]:
    """Return the stage from which each consumer gets a value.

    A value is sent once to each other rank that uses it: to the lowest stage there, the
    *carrier*, which passes it to the others, so that its forward must run before
    theirs. On the producer's own rank, all consumers get it from the producer. (Each
    consumer sends its gradient of the value back separately.)

    Args:
        producer: The stage that makes the value.
        consumers: The stages that use it.
        placement: Rank of each stage.
    """
    first = {placement[producer]: producer}
    givers = {}
    for consumer in sorted(consumers):
        carrier = first.setdefault(placement[consumer], consumer)
        givers[consumer] = producer if carrier == consumer else carrier
    return givers


def carriers_of(
    values: Iterable[tuple[int, Iterable[int]]],
    placement: Mapping[int, int] | Sequence[int],
) -> list[StagePair]:
    """Return pairs (carrier, other) of stages, of which the first must run first.

    Args:
        values: The producer of each value, and its consumers.
        placement: Rank of each stage.
    """
    return sorted(
        {
            (giver, consumer)
            for producer, consumers in values
            for consumer, giver in givers_of(producer, consumers, placement).items()
            if giver != producer
        }
    )


def possible_carriers(
    edges: Iterable[StagePair], placement: Mapping[int, int] | Sequence[int]
) -> list[StagePair]:
    """Return the pairs of `carriers_of` whichever consumers use the same values.

    Args:
        edges: Pairs (producer, consumer); they do not show which use one value.
        placement: Rank of each stage.
    """
    users: dict[tuple[int, int], set[int]] = {}
    for producer, consumer in edges:
        if placement[producer] != placement[consumer]:
            users.setdefault((producer, placement[consumer]), set()).add(consumer)
    pairs = (pair for own in users.values() for pair in combinations(sorted(own), 2))
    return sorted(set(pairs))
