"""Links between ranks, in the form of a file and in that of a simulation."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch_xla_pp import record
from torch_xla_pp.planner.plan_values import PlannedLink
from torch_xla_pp.simulate import Link, Network

_FORMAT = "torch_xla_pp links 1"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLinks:
    """The links between the ranks of a pipeline, as a file states them.

    Args:
        links: One without sender and receiver for all pairs that are not named, and one
            for each pair of ranks with another link.

    Raises:
        ValueError: A link is there twice, lacks one rank, or makes no sense; all such
            are named.
    """

    links: tuple[PlannedLink, ...]

    def __post_init__(self) -> None:
        faults = []
        for number, link in enumerate(self.links):
            pair = link.sender, link.receiver
            is_pair = None not in pair and all(rank >= 0 for rank in pair if rank)
            if pair != (None, None) and (not is_pair or pair[0] == pair[1]):
                faults.append(
                    f"links[{number}]: expected a sender and a receiver that differ, "
                    f"or neither, got {pair[0]} and {pair[1]}"
                )
            rate = math.inf if link.bytes_per_s is None else link.bytes_per_s
            if not (link.latency_s >= 0 and rate > 0):
                faults.append(
                    f"links[{number}]: expected latency_s of at least 0 and "
                    f"bytes_per_s above 0, got {link.latency_s} and {link.bytes_per_s}"
                )
        counts = Counter((link.sender, link.receiver) for link in self.links)
        faults += [
            f"links: expected one from {pair[0]} to {pair[1]}, got {count}"
            for pair, count in counts.items()
            if count > 1
        ]
        if (None, None) not in counts:
            faults.append(
                "links: expected one with sender and receiver null, for all other "
                "pairs, got none"
            )
        if faults:
            raise ValueError("\n".join(f"{fault}. Correct it." for fault in faults))

    def network(self) -> Network:
        """Return them as a plan and `simulate` take them."""
        return network_of(self.links)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return them as JSON.

        Args:
            path: A file to write as well.
        """
        return record.to_json(self, _FORMAT, path)

    @classmethod
    def from_json(cls, source: str | Path) -> "RankLinks":
        """Read what `to_json` wrote.

        Args:
            source: A file, or the text itself, which is known by its line ends.

        Raises:
            ValueError: Links are missing, unknown or faulty; all are named.
        """
        return record.from_json(cls, source, _FORMAT)


def links_of(network: Network) -> tuple[PlannedLink, ...]:
    """Return the links of a network, the default first."""
    pairs: list[tuple[int | None, int | None, Link]] = [(None, None, network.default)]
    pairs += [(s, r, link) for (s, r), link in sorted(network.links.items())]
    return tuple(
        planned_link(link, sender, receiver) for sender, receiver, link in pairs
    )


def planned_link(
    link: Link, sender: int | None = None, receiver: int | None = None
) -> PlannedLink:
    """Return a link in the form of a plan."""
    return PlannedLink(
        sender=sender,
        receiver=receiver,
        latency_s=link.latency_s,
        bytes_per_s=None if math.isinf(link.bytes_per_s) else link.bytes_per_s,
    )


def network_of(links: Iterable[PlannedLink]) -> Network:
    """Return links as `simulate` takes them."""
    default, named = Link(), {}
    for planned in links:
        rate = math.inf if planned.bytes_per_s is None else planned.bytes_per_s
        link = Link(latency_s=planned.latency_s, bytes_per_s=rate)
        if planned.sender is None or planned.receiver is None:
            default = link
        else:
            named[planned.sender, planned.receiver] = link
    return Network(default=default, links=named)
