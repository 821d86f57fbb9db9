"""How long messages between ranks take."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The link from one rank to another.

    Args:
        latency_s: Time that even an empty message takes.
        bytes_per_s: Bandwidth; messages on one link go one after another.

    Raises:
        ValueError: The latency is negative, or there is no bandwidth.
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bytes_per_s > 0):
            raise ValueError(
                "link: expected a latency of at least 0 and a bandwidth above 0, got "
                f"{self.latency_s} s and {self.bytes_per_s} bytes/s. Correct them."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The links between all ranks.

    Args:
        default: Any link that `links` does not have.
        links: Sender's and receiver's rank → the link between them.
    """

    default: Link = field(default_factory=Link)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    def link(self, sender_rank: int, receiver_rank: int) -> Link:
        """Return the link from one rank to another."""
        return self.links.get((sender_rank, receiver_rank), self.default)
