"""Values of one kind that a rank sends to some others and receives from them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from torch_xla_pp.compile import route_in, route_out
from torch_xla_pp.mesh import Tiling
from torch_xla_pp.runtime.exchange import Exchange
from torch_xla_pp.transport import Message, ShardLayout


class Partner(NamedTuple):
    """Say what goes to another rank and what comes from it.

    Attributes:
        rank: Its rank in the group.
        sent: Name of what goes there.
        received: Name of what comes from there.
        layouts: How both lie here.
        there: How they lie on the other rank, None for alike.
    """

    rank: int
    sent: Message
    received: Message
    layouts: Sequence[ShardLayout]
    there: Sequence[Tiling] | None = None


class Swap:
    """Send values to partners and receive theirs.

    Programs do so themselves where the transport lets them, and need routes for it;
    the rest is done here.

    Args:
        exchange: Carries the values.
        partners: Number of a partner, by which programs know it → the partner.
    """

    def __init__(self, exchange: Exchange, partners: Mapping[int, Partner]) -> None:
        self._exchange = exchange
        is_in_graph = exchange.is_in_graph
        self._in_graph = {n: p for n, p in partners.items() if is_in_graph(p.rank)}
        self._by_python = {n: p for n, p in partners.items() if n not in self._in_graph}

    def routes_out(self) -> dict[str, Tensor]:
        """Return routes for what programs send."""
        return {
            route_out(n): self._exchange.send_route(p.sent, p.rank, p.layouts, p.there)
            for n, p in self._in_graph.items()
        }

    def routes_in(self) -> dict[str, Tensor]:
        """Return routes for what programs receive."""
        return {
            route_in(n): self._exchange.receive_route(
                p.received, p.rank, p.layouts, p.there
            )
            for n, p in self._in_graph.items()
        }

    def send(self, values: Mapping[int, Sequence[Tensor]]) -> None:
        """Send what programs do not; `values` has all of it, by partner."""
        for number, partner in self._by_python.items():
            self._exchange.send(
                partner.sent, partner.rank, values[number], partner.there
            )

    def receive(self) -> dict[int, list[Tensor]]:
        """Receive what programs do not, by partner."""
        return {
            n: self._exchange.receive(p.received, p.rank, p.layouts, p.there)
            for n, p in self._by_python.items()
        }
