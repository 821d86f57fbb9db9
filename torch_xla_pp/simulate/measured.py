"""The costs of stages, measured in steps that ran."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import cast

from torch_xla_pp.schedule import Kind
from torch_xla_pp.simulate.costs import Costs, Flow, chain_flows
from torch_xla_pp.simulate.network import Link, Network
from torch_xla_pp.timeline import Span, Timeline


def measured_costs(
    timelines: Sequence[Timeline], flows: Sequence[Flow] | None = None
) -> Costs:
    """Return the mean times of actions.

    The times themselves are kept as samples. An action is charged the time from the end
    of the one before on its rank, so that gaps count, which the host or a loss function
    may have caused. It is not charged for waiting.

    Args:
        timelines: Steps of the same stages; several schedules together may have all
            kinds of actions.
        flows: The values that stages make for each other; None for a chain with the
            sizes that were sent, and 0 between stages of one rank.

    Raises:
        ValueError: There is no timeline.
    """
    if not timelines:
        raise ValueError("measured_costs: expected a timeline, got none. Pass some.")
    times: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    for timeline in timelines:
        for span, charged_s in _charges(timeline):
            times[span.stage, cast(Kind, span.kind)].append(charged_s)
    num_stages = 1 + max((stage for stage, _ in times), default=0)
    return Costs(
        seconds={key: fmean(found) for key, found in sorted(times.items())},
        samples={key: tuple(found) for key, found in sorted(times.items())},
        flows=_flows_in(timelines, num_stages) if flows is None else tuple(flows),
    )


def _charges(timeline: Timeline) -> Iterator[tuple[Span, float]]:
    """Yield every span with the time that it is charged."""
    end_s: dict[int, float] = {}
    for span in timeline.spans:
        start_s = end_s.get(span.rank, span.start_s)
        yield span, max(0.0, span.end_s - start_s - span.waiting_s)
        end_s[span.rank] = max(start_s, span.end_s)


def _flows_in(timelines: Sequence[Timeline], num_stages: int) -> tuple[Flow, ...]:
    """Return a chain, and the flows that skip stages, with mean sizes."""
    sizes: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for timeline in timelines:
        for transfer in timeline.transfers:
            if transfer.kind == "F":
                edge = transfer.sender_stage, transfer.receiver_stage
                sizes[edge].append(transfer.num_bytes)
    for flow in chain_flows(num_stages):
        sizes.setdefault(flow.edges[0], [0])
    return tuple(
        Flow(producer=p, consumers=(c,), num_bytes=round(fmean(found)))
        for (p, c), found in sorted(sizes.items())
    )


def measured_network(timelines: Sequence[Timeline]) -> Network:
    """Return links on which each message takes the median of the recorded times.

    The links are valid for messages of the recorded sizes. A pair of ranks that sent
    nothing has the median of all.

    Args:
        timelines: Steps on the same ranks.
    """
    times: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for transfer in timeline.transfers:
            took_s = max(0.0, transfer.received_s - transfer.sent_s)
            times[transfer.sender_rank, transfer.receiver_rank].append(took_s)
    everything = [took_s for found in times.values() for took_s in found]
    return Network(
        default=Link(latency_s=median(everything or [0.0])),
        links={ranks: Link(latency_s=median(found)) for ranks, found in times.items()},
    )
