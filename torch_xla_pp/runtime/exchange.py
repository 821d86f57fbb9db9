"""Hand values from stage to stage, on one rank or between two."""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from torch_xla_pp.errors import PipelineError
from torch_xla_pp.mesh import Tiling
from torch_xla_pp.runtime.observer import NOBODY, Observer
from torch_xla_pp.transport import (
    InGraphTransport,
    Message,
    ShardLayout,
    XlaPpProcessGroup,
)


class Exchange:
    """Send and receive the values of a group's stages.

    Stages of one rank hand device values over without a copy, through the group's
    mailbox; others use the group's transport. `there` is how values lie, or are to
    lie, on the devices of the other rank.

    Attributes:
        observer: Watches what goes through the host.
    """

    def __init__(self, group: XlaPpProcessGroup) -> None:
        self._group = group
        self.observer: Observer = NOBODY

    @property
    def transport_name(self) -> str:
        """Return what carries the values between ranks."""
        return self._group.transport.name

    def expect(self, message: Message, rank: int) -> None:
        """Make ready for messages of an edge from a stage of group rank `rank`."""
        if not self.is_own(rank):
            self._group.transport.expect(message, rank)

    def is_own(self, rank: int) -> bool:
        """Return whether group rank `rank` is this one."""
        return rank == self._group.rank()

    def is_in_graph(self, rank: int) -> bool:
        """Return whether programs exchange values with group rank `rank` themselves."""
        is_in_graph = isinstance(self._group.transport, InGraphTransport)
        return is_in_graph and not self.is_own(rank)

    def send_route(
        self,
        message: Message,
        rank: int,
        layouts: Sequence[ShardLayout],
        there: Sequence[Tiling] | None = None,
    ) -> Tensor:
        """Return what tells a program where to send `message`."""
        return self._in_graph.send_route(message, rank, layouts, there)

    def receive_route(
        self,
        message: Message,
        rank: int,
        layouts: Sequence[ShardLayout],
        there: Sequence[Tiling] | None = None,
    ) -> Tensor:
        """Return what tells a program which `message` to receive."""
        return self._in_graph.receive_route(message, rank, layouts, there)

    def settle(self) -> None:
        """Wait until all values of other ranks that were asked for are there.

        Raises:
            TransportError: One did not come; what was computed from it is void.
        """
        self._group.transport.settle()

    def send(
        self,
        message: Message,
        rank: int,
        values: Sequence[Tensor],
        there: Sequence[Tiling] | None = None,
    ) -> None:
        """Send `values` to group rank `rank`; does not wait for it."""
        # Noted first: the other rank may have it before the call returns.
        self.observer.sent(message, values, there)
        self._group.transport.send(message, rank, values, there)

    def receive(
        self,
        message: Message,
        rank: int,
        layouts: Sequence[ShardLayout],
        there: Sequence[Tiling] | None = None,
    ) -> list[Tensor]:
        """Return the values of `message` from group rank `rank`."""
        with self.observer.receiving(message):
            return self._group.transport.recv(message, rank, layouts, there)

    def give(self, message: Message, values: Mapping[int, Tensor]) -> None:
        """Lay values of a message ready for a stage of this rank, by slot.

        Several stages may give parts of one message.
        """
        self._group.mailbox.setdefault(message, {}).update(values)

    def take(self, message: Message, slots: Collection[int]) -> dict[int, Tensor]:
        """Return what stages of this rank have given of a message.

        Raises:
            PipelineError: Something was not given yet.
        """
        values = self._group.mailbox.pop(message, {})
        missing = [slot for slot in slots if slot not in values]
        if missing:
            raise PipelineError(
                f"message {message.title}: expected its values from a stage of this "
                f"rank, got none for {len(missing)} of {len(slots)}. Correct the "
                "schedule: a stage runs after those whose values it takes, and of "
                "several that take one value, that of the lowest index runs first."
            )
        return values

    @property
    def _in_graph(self) -> InGraphTransport:
        transport = self._group.transport
        if not isinstance(transport, InGraphTransport):
            raise TypeError(f"expected the in-graph transport, got {transport.name}")
        return transport

    def forget(self, stage: int) -> None:
        """Drop what lies in the mailbox for `stage`, left over from a failed step."""
        mailbox = self._group.mailbox
        for message in [m for m in mailbox if m.stage == stage]:
            del mailbox[message]
