"""Orders of actions that are listed for what stages and their messages cost."""

from collections.abc import Sequence
from math import inf

from torch_xla_pp.schedule import (
    Delivery,
    Kind,
    Schedule,
    listed_actions,
    possible_carriers,
)
from torch_xla_pp.simulate.costs import Costs
from torch_xla_pp.simulate.network import Network
from torch_xla_pp.simulate.routes import BACKWARD, FORWARD, Routes
from torch_xla_pp.simulate.seconds import latest_ends, step_seconds, with_final_s


def listed_step(
    costs: Costs,
    placement: Sequence[int],
    num_microbatches: int,
    network: Network,
    most_live: Sequence[int],
    *,
    split_backward: bool,
    most_waiting: int | None = None,
    routes: Routes | None = None,
    limit_s: float = inf,
) -> tuple[Schedule, float] | None:
    """Return the order of `list_schedule` for costs, and the time of a step with it.

    Messages wait for their link and go as soon as they are made, as in `step_seconds`,
    whose time it is.

    Args:
        costs: The costs of stages; `final_s` counts, too.
        placement: Rank of each stage.
        num_microbatches: Number of microbatches.
        network: The links between ranks.
        most_live: For each stage how many microbatches it may hold.
        split_backward: Whether to run I and W in place of B.
        most_waiting: See `list_schedule`.
        routes: The routes of the costs' messages, if they are known.
        limit_s: What a step may take.

    Returns:
        The order and its time, None if it takes longer than the limit.
    """
    routes = routes or Routes.of(costs.flows, placement, network)
    kinds: tuple[Kind, ...] = ("F", "I", "W") if split_backward else ("F", "B")
    seconds = [
        [costs.seconds[stage, kind] for kind in kinds]
        for stage in range(len(placement))
    ]
    edges = costs.edges
    forward = _deliveries(routes, FORWARD, [own[0] for own in seconds])
    backward = _deliveries(routes, BACKWARD, [own[1] for own in seconds])
    after = [*edges, *possible_carriers(edges, placement)]
    before = [(consumer, producer) for producer, consumer in edges]
    is_timed = True
    for found, pairs in ((forward, after), (backward, before)):
        for giver, taker in pairs:
            if all(own.receiver != taker for own in found[giver]):
                # An order that no message brings about: a link that takes no time.
                link = routes.num_links + placement[giver]
                found[giver].append(Delivery(taker, link))
                is_timed &= placement[giver] == placement[taker]
    latest_s: list[float] = []
    if is_timed:
        latest_s = latest_ends(1 + max(placement), costs, placement, limit_s)
    listed = listed_actions(
        placement,
        num_microbatches,
        seconds,
        most_live,
        forward,
        backward,
        most_waiting=most_waiting,
        latest_s=latest_s,
    )
    if listed is None:
        return None
    schedule, ends_s = listed
    if is_timed:
        step_s = with_final_s(ends_s, costs, placement)
    else:
        step_s = step_seconds(schedule, costs, network, routes=routes)
    return (schedule, step_s) if step_s <= limit_s else None


def _deliveries(
    routes: Routes, phase: int, seconds: Sequence[float]
) -> list[list[Delivery]]:
    """Return what each stage sends in a phase whose actions take so long."""
    found: list[list[Delivery]] = []
    for stage, own_s in enumerate(seconds):
        streams = [routes.streams[n] for n in routes.sends.get((stage, phase), ())]
        found.append(
            [
                Delivery(
                    receiver=stream.hop.receiver,
                    link=stream.link,
                    sending_s=stream.sending_s,
                    latency_s=stream.latency_s,
                    early_s=(1 - stream.hop.part) * own_s,
                )
                for stream in streams
            ]
        )
    return found
