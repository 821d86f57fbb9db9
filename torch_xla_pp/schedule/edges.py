"""Facts about stages that follow from the edges between them.

An edge is a pair (producer, consumer) of stages. A producer is always the lower one.
"""

from collections.abc import Iterable, Mapping, Sequence

Edge = tuple[int, int]


def chain_of(num_stages: int) -> tuple[Edge, ...]:
    """Return the edges of stages of which each uses the one before."""
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


def check_edges(user: str, edges: Iterable[Edge], num_stages: int) -> None:
    """Refuse edges that do not lead from a stage to a higher one.

    Raises:
        ValueError: Names `user` and every faulty edge.
    """
    faulty = [f"{p}->{c}" for p, c in edges if not 0 <= p < c < num_stages]
    if faulty:
        raise ValueError(
            f"{user}: expected edges from a stage to a higher one of 0.."
            f"{num_stages - 1}, got {', '.join(faulty)}. Number the stages in the "
            "order of the model's data flow."
        )


def neighbours_of(edges: Iterable[Edge], num_stages: int) -> list[list[int]]:
    """Return for each stage where the edges that begin at it lead."""
    found: list[list[int]] = [[] for _ in range(num_stages)]
    for first, second in edges:
        found[first].append(second)
    return found


def depths_of(edges: Iterable[Edge], num_stages: int) -> list[int]:
    """Return the number of stages on the longest path from each stage to an end."""
    consumers = neighbours_of(edges, num_stages)
    depths = [1] * num_stages
    for stage in reversed(range(num_stages)):
        depths[stage] += max((depths[c] for c in consumers[stage]), default=0)
    return depths


def carriers_of(edges: Sequence[Edge], placement: Mapping[int, int]) -> list[Edge]:
    """Return pairs (carrier, other) of stages that may share a received value.

    What several stages of a rank use of a stage on another rank is sent to it once.
    The lowest of them, the *carrier*, receives it for the others, so that its
    forward has to run before theirs.
    """
    found: set[Edge] = set()
    first: dict[tuple[int, int], int] = {}
    for producer, consumer in sorted(edges):
        rank = placement[consumer]
        if rank == placement[producer]:
            continue
        carrier = first.setdefault((producer, rank), consumer)
        if carrier != consumer:
            found.add((carrier, consumer))
    return sorted(found)
