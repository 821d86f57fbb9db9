"""The messages that an action waits for, and those that it sends.

Terms: a *hop* brings values or gradients from one stage to another. Hops between ranks
are messages; those of one phase from a stage to another are one *stream*, which
carries one message for each microbatch. Values that stay on a rank arrive at once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_xla_pp.schedule import Kind, givers_of
from torch_xla_pp.simulate.costs import Flow
from torch_xla_pp.simulate.network import Network

FORWARD, BACKWARD, WEIGHT = range(3)
PHASES: Mapping[Kind, int] = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": WEIGHT}

Phase = tuple[int, int]  # stage, and one of PHASES


class Hop(NamedTuple):
    """The values or gradients, by phase, that one stage sends to another."""

    phase: int
    sender: int
    receiver: int
    num_bytes: int
    part: float = 1.0
    """The part of the sender's action after which they are there."""


class Stream(NamedTuple):
    """The messages that one stage sends to another.

    Args:
        hop: Stages, phase and size, and when in an action they are there.
        sender_rank: Rank that sends.
        receiver_rank: Rank that receives.
        link: Number of the link between them.
        sending_s: Time for which a message occupies the link.
        latency_s: Time until it arrives after that.
    """

    hop: Hop
    sender_rank: int
    receiver_rank: int
    link: int
    sending_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """The streams that the actions of each stage and phase need and send.

    Args:
        streams: All streams.
        num_links: Number of links that they use.
        receives: Numbers of the streams that they receive from.
        sends: Numbers of the streams that they send on.
        after: Stages and phases that must come before them on their rank, for the same
            microbatch.
    """

    streams: tuple[Stream, ...]
    num_links: int
    receives: Mapping[Phase, list[int]]
    sends: Mapping[Phase, list[int]]
    after: Mapping[Phase, list[Phase]]

    @classmethod
    def of(
        cls,
        flows: tuple[Flow, ...],
        placement: Mapping[int, int] | Sequence[int],
        network: Network,
    ) -> "Routes":
        """Find the routes of all values and gradients.

        Args:
            flows: The values that stages make for each other.
            placement: Rank of each stage.
            network: The links between ranks.
        """
        receives: defaultdict[Phase, list[int]] = defaultdict(list)
        sends: defaultdict[Phase, list[int]] = defaultdict(list)
        after: defaultdict[Phase, list[Phase]] = defaultdict(list)
        is_mapping = isinstance(placement, Mapping)
        for stage in placement if is_mapping else range(len(placement)):
            after[stage, BACKWARD].append((stage, FORWARD))
            after[stage, WEIGHT].append((stage, BACKWARD))
        streams: list[Stream] = []
        links: dict[tuple[int, int], int] = {}
        for hop in _merged(hop for flow in flows for hop in hops(flow, placement)):
            ranks = placement[hop.sender], placement[hop.receiver]
            if ranks[0] == ranks[1]:
                after[hop.receiver, hop.phase].append((hop.sender, hop.phase))
                continue
            sends[hop.sender, hop.phase].append(len(streams))
            receives[hop.receiver, hop.phase].append(len(streams))
            link = network.link(*ranks)
            streams.append(
                Stream(
                    hop=hop,
                    sender_rank=ranks[0],
                    receiver_rank=ranks[1],
                    link=links.setdefault(ranks, len(links)),
                    sending_s=hop.num_bytes / link.bytes_per_s,
                    latency_s=link.latency_s,
                )
            )
        for numbers in sends.values():
            numbers.sort(key=lambda number: streams[number].hop.part)
        return cls(
            streams=tuple(streams),
            num_links=len(links),
            receives=receives,
            sends=sends,
            after=after,
        )


def hops(flow: Flow, placement: Mapping[int, int] | Sequence[int]) -> Iterator[Hop]:
    """Yield the hops of a value to its consumers, and of its gradients back."""
    givers = givers_of(flow.producer, flow.consumers, placement)
    parts = dict(zip(flow.consumers, flow.graded_at, strict=False))
    for consumer, giver in givers.items():
        part = flow.made_at if giver == flow.producer else 1.0
        yield Hop(FORWARD, giver, consumer, flow.num_bytes, part)
        if flow.has_gradient:
            part = parts.get(consumer, 1.0)
            yield Hop(BACKWARD, consumer, flow.producer, flow.num_bytes, part)


def _merged(hops: Iterable[Hop]) -> list[Hop]:
    """Join all hops with the same stages and phase, which are there with the last."""
    found: dict[tuple[int, int, int], Hop] = {}
    for hop in hops:
        key = hop[:3]
        if key in found:
            old = found[key]
            size, part = hop.num_bytes + old.num_bytes, max(hop.part, old.part)
            found[key] = Hop(*key, size, part)
        else:
            found[key] = hop
    return [found[key] for key in sorted(found)]
