"""The transport that copies through the host program.

It works with every PJRT device. Device shards are read to the host, sent over the
group's wire and uploaded again. Threads read from the devices, write, and receive; the
program's own thread waits for a message only when it is about to enqueue a program that
needs it.
"""

import functools
from collections.abc import Sequence

from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.errors import TransportError
from torch_xla_pp.mesh import Tiling
from torch_xla_pp.transport.inbox import Key
from torch_xla_pp.transport.outbox import Outbox, Shards
from torch_xla_pp.transport.pieces import (
    are_alike,
    pack_pieces,
    part_sizes,
    unpack_pieces,
)
from torch_xla_pp.transport.rendezvous import Rendezvous
from torch_xla_pp.transport.shard_bytes import from_bytes, to_bytes
from torch_xla_pp.transport.stage_transport import (
    Message,
    ShardLayout,
    no_values,
    not_sent_yet,
)
from torch_xla_pp.transport.wire import Wire


class HostTransport:
    """The transport through the host, whose programs neither send nor receive.

    A replicated value is sent once, and so is each element of a value that the peer
    shards in another way. Layouts are agreed on before, so messages have no
    description.

    Args:
        wire: Carries the bytes.
        rendezvous: Receives the reports of failures.
    """

    name = "host"
    in_program = None

    def __init__(self, wire: Wire, rendezvous: Rendezvous) -> None:
        self._wire = wire
        self._rendezvous = rendezvous
        self._outbox = Outbox(wire, rendezvous)

    def expect(self, message: Message, peer: int) -> None:
        """Do nothing: the wire accepts all messages."""

    def settle(self) -> None:
        """Raise failures; values that were received are there already.

        Raises:
            Exception: A rank has reported a failure, see `Rendezvous.check`.
        """
        self._rendezvous.check()

    def close(self) -> None:
        """Pass everything that was sent to the wire; the group closes the wire."""
        self._outbox.close()

    def send(
        self,
        message: Message,
        peer: int,
        tensors: Sequence[Tensor],
        there: Sequence[Tiling] | None = None,
    ) -> None:
        """Send `tensors` to group rank `peer`, once they are computed.

        Waits neither for the device nor for the peer, see `Outbox.put`.

        Raises:
            ValueError: There are no tensors.
            TransportError: The peer is gone.
        """
        if not tensors:
            raise no_values(message)
        pack = functools.partial(_packed, there)
        self._outbox.put(peer, _key(message), tensors, pack)

    def recv(
        self,
        message: Message,
        peer: int,
        layouts: Sequence[ShardLayout],
        there: Sequence[Tiling] | None = None,
    ) -> list[Tensor]:
        """Wait for the values of `message` from group rank `peer`.

        Raises:
            ValueError: There are no layouts.
            TransportError: The message differs from `layouts`, the peer is gone, or
                the peer is this rank and has not sent it yet.
            TransportTimeout: It did not come in time.
        """
        if not layouts:
            raise no_values(message)
        ticket = self._wire.expect(peer, _key(message))
        if peer == self._wire.rank:
            self._outbox.flush()
            if not self._wire.has_arrived(ticket):
                raise not_sent_yet(message)
        parts = self._wire.receive(ticket).parts
        _check(message, peer, parts, part_sizes(layouts, there))
        if there is None or are_alike(layouts, there):
            left = iter(parts)
            shards = [
                [
                    from_bytes(next(left), layout.shard_shape, layout.dtype)
                    for _ in range(layout.tiling.num_shards)
                ]
                for layout in layouts
            ]
        else:
            sides = zip(parts, layouts, there, strict=True)
            shards = [unpack_pieces(part, layout, far) for part, layout, far in sides]
        return [
            xla_compat.from_local_shards(found, layout.sharding, layout.shape)
            for found, layout in zip(shards, layouts, strict=True)
        ]


def _key(message: Message) -> Key:
    return (message.title,)


def _packed(
    there: Sequence[Tiling] | None, tensors: Sequence[Tensor], values: Shards
) -> list[Tensor]:
    """Return the parts of a message: shards, or all pieces of a value.

    Args:
        there: The tilings of the values on the peer, None if they are the same.
        tensors: The values on the devices.
        values: Their shards on the host.
    """
    if there is not None:
        own = [ShardLayout.of_tensor(tensor) for tensor in tensors]
        if not are_alike(own, there):
            sides = zip(values, own, there, strict=True)
            return [pack_pieces(shards, x.tiling, far) for shards, x, far in sides]
    return [to_bytes(shard) for shards in values for shard in shards]


def _check(
    message: Message, peer: int, parts: Sequence[Tensor], expected: list[int]
) -> None:
    got = [part.numel() for part in parts]
    if expected != got:
        raise TransportError(
            f"recv {message.title} from rank {peer}: expected parts of {expected} "
            f"bytes, got {got}. Use the same model, split and schedule on both ranks."
        )
