"""The channels by which a stage sends values to other stages and receives theirs.

Terms: an *edge* is one message of each microbatch between two stages, in one direction,
as one of the two sees it. Its *channel* is what carries the message. A channel *feeds*
a program the inputs that it receives, and what the program returned is *drained* into
its channels:

| channel | a sender feeds | a sender drains | a receiver feeds |
|---|---|---|---|
| through the program | a route | nothing | a route |
| through the host | nothing | sends | the values |
| of the same rank | nothing | puts them into the mailbox | the values |

Values have the names that the stage's programs know them by.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol, final

from torch import Tensor

from torch_xla_pp.channels.observer import Observer
from torch_xla_pp.compile import Border, Program, route_in, route_out
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.mesh import Tiling
from torch_xla_pp.transport import Message, ProgramOps, ShardLayout, XlaPpProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """One message of each microbatch, as the stage sees it that sends or receives it.

    Args:
        message: Its name, of any microbatch.
        is_sent: Whether this stage sends it.
        peer: Number of the other side, which distinguishes a program's routes.
        rank: Rank of the other side in the group.
        names: What the stage's programs call the values.
        layouts: Their layouts on this rank's devices.
        slots: Numbers of the values that both sides know, used on the same rank only,
            where several stages may send parts of one message.
        there: Returns their tilings on the other rank, which are known once its stage
            has its plan; None if they are the same.
    """

    message: Message
    is_sent: bool
    peer: int
    rank: int
    names: tuple[str, ...]
    layouts: tuple[ShardLayout, ...]
    slots: tuple[int, ...] = ()
    there: Callable[[], Sequence[Tiling]] | None = None

    def tilings_there(self) -> Sequence[Tiling] | None:
        """Return the tilings on the other rank, None if they are those of this rank."""
        return None if self.there is None else self.there()


class Channel(Protocol):
    """What carries the message of an edge."""

    edge: Edge

    @property
    def border(self) -> Border | None:
        """Return its border, None if programs do not exchange it themselves."""

    def feed(self, microbatch: int) -> dict[str, Tensor]:
        """Return the operands that a program gets for the message, by name."""

    def drain(self, microbatch: int, values: Mapping[str, Tensor]) -> None:
        """Send what a program returned, unless it has sent; `values` has more."""


class Endpoint:
    """A stage's access to the other stages of its group.

    Args:
        group: The ranks of the stages.

    Attributes:
        group: As given.
        observer: Watches what goes through the host, None for nobody.
    """

    def __init__(self, group: XlaPpProcessGroup) -> None:
        self.group = group
        self.observer: Observer | None = None

    def open(self, edge: Edge) -> Channel:
        """Return the channel of an edge."""
        if edge.rank == self.group.rank():
            return LocalChannel(edge, self.group.mailbox)
        ops = self.group.transport.in_program
        return HostChannel(edge, self) if ops is None else ProgramChannel(edge, ops)

    def forget(self, stage: int) -> None:
        """Drop what a failed step has left in the mailbox for `stage`."""
        mailbox = self.group.mailbox
        for message in [m for m in mailbox if m.stage == stage]:
            del mailbox[message]


@final
class ProgramChannel:
    """A channel through the program, which sends or receives the message itself.

    Args:
        edge: What it carries.
        ops: What the program sends and receives with.
    """

    def __init__(self, edge: Edge, ops: ProgramOps) -> None:
        self.edge = edge
        self.border = Border(edge.peer, edge.names, edge.layouts, ops)
        self._name = (route_out if edge.is_sent else route_in)(edge.peer)
        self._route = ops.send_route if edge.is_sent else ops.receive_route
        self._messages: dict[int, Message] = {}

    def feed(self, microbatch: int) -> dict[str, Tensor]:
        """Return the route of the message."""
        edge = self.edge
        message = self._messages.get(microbatch)
        if message is None:
            message = edge.message._replace(microbatch=microbatch)
            self._messages[microbatch] = message
        there = edge.tilings_there()
        return {self._name: self._route(message, edge.rank, edge.layouts, there)}

    def drain(self, microbatch: int, values: Mapping[str, Tensor]) -> None:
        """Do nothing: the program has sent."""


@final
class HostChannel:
    """A channel through the host, which calls the transport before or after programs.

    Args:
        edge: What it carries.
        endpoint: The stage's access to its group.
    """

    border = None

    def __init__(self, edge: Edge, endpoint: Endpoint) -> None:
        self.edge = edge
        self._endpoint = endpoint
        self._transport = endpoint.group.transport

    def feed(self, microbatch: int) -> dict[str, Tensor]:
        """Return the values of the message, once they are there."""
        if self.edge.is_sent:
            return {}
        message = self.edge.message._replace(microbatch=microbatch)
        edge, observer = self.edge, self._endpoint.observer
        receiving = nullcontext() if observer is None else observer.receiving(message)
        with receiving:
            there = edge.tilings_there()
            values = self._transport.recv(message, edge.rank, edge.layouts, there)
        return dict(zip(edge.names, values, strict=True))

    def drain(self, microbatch: int, values: Mapping[str, Tensor]) -> None:
        """Send the values; waits neither for the devices nor for the other rank."""
        if not self.edge.is_sent:
            return
        message = self.edge.message._replace(microbatch=microbatch)
        sent = [values[name] for name in self.edge.names]
        there = self.edge.tilings_there()
        # Observed first: the other rank may have it before the call returns.
        if self._endpoint.observer is not None:
            self._endpoint.observer.sent(message, sent, there)
        self._transport.send(message, self.edge.rank, sent, there)


@final
class LocalChannel:
    """A channel between two stages of a rank: device values, without a copy.

    Args:
        edge: What it carries.
        mailbox: Message → slot → value, of all stages of the rank.
    """

    border = None

    def __init__(self, edge: Edge, mailbox: dict[Message, dict[int, Tensor]]) -> None:
        self.edge = edge
        self._mailbox = mailbox

    def feed(self, microbatch: int) -> dict[str, Tensor]:
        """Return the values that stages of this rank have put into the mailbox.

        Raises:
            PipelineError: A value is not there yet.
        """
        edge = self.edge
        if edge.is_sent:
            return {}
        message = edge.message._replace(microbatch=microbatch)
        values = self._mailbox.pop(message, {})
        missing = [slot for slot in edge.slots if slot not in values]
        if missing:
            raise PipelineError(
                f"message {message.title}: expected its values from a stage of this "
                f"rank, got none for {len(missing)} of {len(edge.slots)}. Correct the "
                "schedule: a stage runs after those whose values it takes, and of "
                "several that take one value, that of the lowest index runs first."
            )
        named = zip(edge.names, edge.slots, strict=True)
        return {name: values[slot] for name, slot in named}

    def drain(self, microbatch: int, values: Mapping[str, Tensor]) -> None:
        """Put the values into the mailbox, as tensors of the other stage's own."""
        if not self.edge.is_sent:
            return
        message = self.edge.message._replace(microbatch=microbatch)
        named = zip(self.edge.names, self.edge.slots, strict=True)
        given = {slot: values[name].detach() for name, slot in named}
        self._mailbox.setdefault(message, {}).update(given)


def run_with(
    program: Program,
    values: Mapping[str, Tensor],
    *,
    received: Sequence[Channel] = (),
    sent: Sequence[Channel] = (),
) -> dict[str, Tensor]:
    """Run a program once a step, fed by its channels and drained into them."""
    given = dict(values)
    for channel in (*received, *sent):
        given |= channel.feed(0)
    results = program(given) if program.inputs else {}
    for channel in sent:
        channel.drain(0, {**given, **results})
    return results


def borders_of(channels: Sequence[Channel]) -> list[Border]:
    """Return the borders of the channels that programs exchange themselves."""
    return [channel.border for channel in channels if channel.border is not None]


def returned_for(channels: Sequence[Channel]) -> set[str]:
    """Return the names of what programs must return for channels to send."""
    return {name for x in channels if x.border is None for name in x.edge.names}
