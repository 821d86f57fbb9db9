"""Orders for any stage graph, from a simulation in which ranks run what they can.

Terms: an *edge* (producer, consumer) says that a stage uses values of another. The
*depth* of a stage is the number of stages on the longest path from it to a stage
that nothing uses, both included. A microbatch is *live* in a stage from its forward to
its backward, or to its W if backwards are split. Every stage takes the microbatches in
order.

Law: an order runs to its end if a stage may hold one microbatch or more, as the lowest
microbatch that is not finished can always go on.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import chain
from math import inf
from typing import NamedTuple

from torch_xla_pp.schedule.action import Action, Kind
from torch_xla_pp.schedule.builders.counts import check_counts
from torch_xla_pp.schedule.edges import (
    StagePair,
    check_edges,
    depths_of,
    possible_carriers,
)
from torch_xla_pp.schedule.schedule import Schedule

_FORWARD, _BACKWARD, _WEIGHT = range(3)
_KINDS: Mapping[bool, tuple[Kind, ...]] = {False: ("F", "B"), True: ("F", "I", "W")}


def list_schedule(
    edges: Iterable[StagePair],
    placement: Mapping[int, int],
    num_microbatches: int,
    seconds: Mapping[tuple[int, Kind], float] | None = None,
    *,
    max_live: int | Mapping[int, int] | None = None,
    split_backward: bool = False,
    most_waiting: int | None = None,
    delays_s: Mapping[StagePair, float] | None = None,
) -> Schedule:
    """Let every free rank run at once the most urgent action that can run.

    A backward (or I) goes before a forward, then the lowest microbatch, then the stage
    next to the end (backward) or to the start (forward). A W fills the time in which a
    rank has nothing else to run: the zero bubble of any stage graph. Takes some 2 µs an
    action.

    Source: list scheduling is that of Graham, "Bounds on Multiprocessing Timing
    Anomalies", SIAM Journal on Applied Mathematics, 1969; that a backward goes first,
    and depth bounds what is live, is of Jeon et al., "GraphPipe: Improving Performance
    and Scalability of DNN Training with Graph Pipeline Parallelism", ASPLOS 2025,
    section 6; W as a filler is of Qi et al., "Zero Bubble (Almost) Pipeline
    Parallelism", ICLR 2024.

    Args:
        edges: Pairs (producer, consumer).
        placement: Stage → rank.
        num_microbatches: Number of microbatches.
        seconds: Stage and kind of action → its time; None for 1 each.
        max_live: How many microbatches may be live in a stage: one number for all
            stages, or stage → number, with no bound for those not named; None for the
            depth of each stage.
        split_backward: Whether to run I and W in place of B.
        most_waiting: The number of waiting W of a rank from which one of them goes
            before a forward; None for never.
        delays_s: Edge → time from the end of an action to the arrival of its message at
            the other stage, in either direction; 0 for edges that are not named.

    Raises:
        ValueError: An edge does not lead to a higher stage, a stage or a rank is
            missing from the placement, a time is missing or negative, or a stage may
            hold nothing.
    """
    edges = _checked("list_schedule", edges, placement, num_microbatches)
    num_stages = len(placement)
    own_s = delays_s or {}
    ranks = [placement[stage] for stage in range(num_stages)]
    along: list[list[Delivery]] = [[] for _ in ranks]
    against: list[list[Delivery]] = [[] for _ in ranks]
    for producer, consumer in edges:
        # Links that take no time to send: one for each rank is as good as any.
        for hops, giver, taker in (
            (along, producer, consumer),
            (against, consumer, producer),
        ):
            delay_s = own_s.get((producer, consumer), 0.0)
            hops[giver].append(Delivery(taker, ranks[giver], latency_s=delay_s))
    # Values that a carrier receives for others reach them once its forward has run.
    for first, other in possible_carriers(edges, placement):
        along[first].append(Delivery(other, ranks[first]))
    found = listed_actions(
        ranks,
        num_microbatches,
        _times(num_stages, _KINDS[split_backward], seconds),
        _most_live(edges, num_stages, num_microbatches, max_live),
        along,
        against,
        most_waiting=most_waiting,
    )
    if found is None:
        raise RuntimeError("list_schedule: expected an order that has no limit.")
    return found[0]


def dag_1f1b(
    edges: Iterable[StagePair], placement: Mapping[int, int], num_microbatches: int
) -> Schedule:
    """Run forwards as far ahead as the depth of a stage allows, but backwards first.

    Branches of the model that do not depend on each other run at the same time if
    they are on different ranks. The microbatches in flight in a stage are as many as
    its depth, however wide the graph is. On a chain with one stage per rank it is 1F1B.
    It is the `list_schedule` of actions that all take one unit of time.

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
    edges = _checked("dag_1f1b", edges, placement, num_microbatches)
    return list_schedule(edges, placement, num_microbatches)


def _checked(
    builder: str,
    edges: Iterable[StagePair],
    placement: Mapping[int, int],
    num_microbatches: int,
) -> list[StagePair]:
    """Return each edge once, in order.

    Raises:
        ValueError: Stages, ranks or edges are not as the builders say.
    """
    check_counts(builder, num_microbatches=num_microbatches)
    stages, ranks = sorted(placement), sorted(set(placement.values()))
    for what, found in (("stages", stages), ("ranks", ranks)):
        if found != list(range(len(found))) or not found:
            raise ValueError(
                f"{builder}: expected a placement of {what} that count from 0 without "
                f"gaps, got {what} {found}. Give every stage a rank and every rank a "
                "stage."
            )
    edges = sorted(set(edges))
    check_edges(builder, edges, len(placement))
    return edges


class Delivery(NamedTuple):
    """The way of what each forward, or each backward, of a stage sends to another one.

    Args:
        receiver: Stage that receives.
        link: Number of the link, which takes one message at a time.
        sending_s: Time for which a message occupies the link.
        latency_s: Time until it arrives after that.
        early_s: Time before the end of the action at which it is there.
    """

    receiver: int
    link: int
    sending_s: float = 0.0
    latency_s: float = 0.0
    early_s: float = 0.0


def listed_actions(
    ranks: Sequence[int],
    num_microbatches: int,
    seconds: Sequence[Sequence[float]],
    most_live: Sequence[int],
    forward: Sequence[Sequence[Delivery]],
    backward: Sequence[Sequence[Delivery]],
    *,
    most_waiting: int | None = None,
    latest_s: Sequence[float] = (),
) -> tuple[Schedule, list[float]] | None:
    """Run all actions as `list_schedule` does, with links between stages.

    It is one function, as calls would take longer than its work.

    Args:
        ranks: Rank of each stage.
        num_microbatches: Number of microbatches.
        seconds: For each stage the times of F and B, or of F, I and W.
        most_live: For each stage how many microbatches it may hold.
        forward: For each stage what its forwards send, in the order of sending.
        backward: The same of backwards, or of I.
        most_waiting: See `list_schedule`.
        latest_s: When each rank has to be done at the latest; () for no limit.

    Returns:
        The order, and when each rank is done; None if one cannot be in time.
    """
    num_stages, num_ranks = len(ranks), 1 + max(ranks)
    stages_of = [
        [s for s in range(num_stages) if ranks[s] == r] for r in range(num_ranks)
    ]
    is_split = len(seconds[0]) > 2
    kinds = _KINDS[is_split]
    # Numbers of the forwards, backwards and W that each stage has begun.
    begun = [[0] * num_stages for _ in range(3)]
    forwards, backwards, weights = begun
    finished = weights if is_split else backwards
    # When all messages for a stage and microbatch have arrived; infinity for not yet.
    ready_s: list[list[list[float]]] = []
    missing: list[list[list[int]]] = []
    arrived_s: list[list[list[float]]] = []
    deliveries = forward, backward
    for hops in deliveries:
        counts = [0] * num_stages
        for hop in chain.from_iterable(hops):
            counts[hop.receiver] += 1
        ready_s.append([[inf if n else 0.0] * num_microbatches for n in counts])
        missing.append([[n] * num_microbatches for n in counts])
        arrived_s.append([[0.0] * num_microbatches for _ in counts])
    forward_ready_s, backward_ready_s = ready_s
    num_links = 1 + max((h.link for h in chain(*forward, *backward)), default=-1)
    links_free_s = [0.0] * num_links
    rows: list[list[Action]] = [[] for _ in stages_of]
    free_s = [0.0] * num_ranks
    # For how long each rank may wait.
    spare_s = [inf] * num_ranks
    if latest_s:
        spare_s = [*latest_s]
        for rank, own_s in zip(ranks, seconds, strict=True):
            spare_s[rank] -= num_microbatches * sum(own_s)
    # When to look at a rank again: it is free then, or a message has arrived.
    wakings = [(0.0, rank) for rank in range(num_ranks)]
    num_left = num_stages * len(kinds) * num_microbatches
    while num_left:
        now_s, rank = heappop(wakings)
        if free_s[rank] > now_s:
            continue
        own = stages_of[rank]
        chosen, phase, microbatch = -1, _BACKWARD, num_microbatches
        for stage in reversed(own):
            number = backwards[stage]
            if (
                number < microbatch
                and number < forwards[stage]
                and backward_ready_s[stage][number] <= now_s
            ):
                chosen, microbatch = stage, number
        late, late_microbatch = -1, num_microbatches
        if chosen < 0 and is_split:
            waiting = 0
            for stage in reversed(own):
                number = weights[stage]
                waiting += backwards[stage] - number
                if number < late_microbatch and number < backwards[stage]:
                    late, late_microbatch = stage, number
            if late >= 0 and most_waiting is not None and waiting >= most_waiting:
                chosen, phase, microbatch = late, _WEIGHT, late_microbatch
        if chosen < 0:
            phase = _FORWARD
            for stage in own:
                number = forwards[stage]
                if (
                    number < microbatch
                    and number - finished[stage] < most_live[stage]
                    and forward_ready_s[stage][number] <= now_s
                ):
                    chosen, microbatch = stage, number
        if chosen < 0:
            if late < 0:
                continue
            chosen, phase, microbatch = late, _WEIGHT, late_microbatch
        if now_s > free_s[rank]:
            spare_s[rank] -= now_s - free_s[rank]
            if spare_s[rank] < 0:
                return None
        rows[rank].append(_action(chosen, kinds[phase], microbatch))
        begun[phase][chosen] += 1
        num_left -= 1
        end_s = now_s + seconds[chosen][phase]
        free_s[rank] = end_s
        heappush(wakings, (end_s, rank))
        if phase == _WEIGHT:
            continue
        for receiver, link, sending_s, latency_s, early_s in deliveries[phase][chosen]:
            link_s, sent_s = links_free_s[link], end_s - early_s
            link_s = (link_s if link_s > sent_s else sent_s) + sending_s
            links_free_s[link] = link_s
            arrival_s = link_s + latency_s
            arrivals_s = arrived_s[phase][receiver]
            if arrivals_s[microbatch] > arrival_s:
                arrival_s = arrivals_s[microbatch]
            left = missing[phase][receiver]
            left[microbatch] -= 1
            if left[microbatch]:
                arrivals_s[microbatch] = arrival_s
                continue
            ready_s[phase][receiver][microbatch] = arrival_s
            other = ranks[receiver]
            if arrival_s >= free_s[other]:
                heappush(wakings, (arrival_s, other))
    return Schedule(actions=tuple(map(tuple, rows))), free_s


def _most_live(
    edges: Sequence[StagePair],
    num_stages: int,
    num_microbatches: int,
    max_live: int | Mapping[int, int] | None,
) -> list[int]:
    """Return the most live microbatches of each stage."""
    if max_live is None:
        return depths_of(edges, num_stages)
    if isinstance(max_live, int):
        found = [max_live] * num_stages
    else:
        found = [max_live.get(stage, num_microbatches) for stage in range(num_stages)]
    for stage, bound in enumerate(found):
        if bound < 1:
            raise ValueError(
                f"list_schedule: expected max_live of at least 1 for stage {stage}, "
                f"got {bound}. Allow each stage one microbatch."
            )
    return found


def _times(
    num_stages: int,
    kinds: Sequence[Kind],
    seconds: Mapping[tuple[int, Kind], float] | None,
) -> list[list[float]]:
    """Return for each stage the times of actions of these kinds."""
    stages = range(num_stages)
    if seconds is None:
        return [[1.0] * len(kinds) for _ in stages]
    faults = [
        f"{stage}{kind}: {seconds.get((stage, kind), 'none')}"
        for stage in stages
        for kind in kinds
        if not seconds.get((stage, kind), -1.0) >= 0
    ]
    if faults:
        raise ValueError(
            "list_schedule: expected a time of at least 0 s for every stage and each "
            f"of {', '.join(kinds)}, got {', '.join(faults)}. Give them."
        )
    return [[seconds[stage, kind] for kind in kinds] for stage in stages]


@lru_cache(maxsize=1 << 17)
def _action(stage: int, kind: Kind, microbatch: int) -> Action:
    return Action(stage=stage, kind=kind, microbatch=microbatch)
