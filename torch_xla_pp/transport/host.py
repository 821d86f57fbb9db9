"""The transport that copies through the host program.

Fit for every PJRT device. Device shards are read to the host, travel over the group's
wire and are uploaded again; Python waits for both the device and the message.
"""

from collections.abc import Sequence

from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.errors import TransportError
from torch_xla_pp.mesh import Tiling
from torch_xla_pp.transport.inbox import Key
from torch_xla_pp.transport.pieces import (
    are_alike,
    pack_pieces,
    part_sizes,
    unpack_pieces,
)
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

    A replicated value travels once, and so does each element of a value that is
    sharded otherwise on the peer. Layouts are agreed on before, so no message
    describes itself.

    Args:
        wire: Carries the bytes.
    """

    name = "host"
    in_program = None

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def expect(self, message: Message, peer: int) -> None:
        """Do nothing: the wire takes all messages."""

    def settle(self) -> None:
        """Do nothing: values that were received are there."""

    def close(self) -> None:
        """Do nothing: the wire is closed by its group."""

    def send(
        self,
        message: Message,
        peer: int,
        tensors: Sequence[Tensor],
        there: Sequence[Tiling] | None = None,
    ) -> None:
        """Copy `tensors` out and send them to group rank `peer`.

        Waits until the device has computed them, never for the peer.

        Raises:
            ValueError: There are no tensors.
            TransportError: The peer is gone.
        """
        if not tensors:
            raise no_values(message)
        values = xla_compat.read_shards(tensors)
        parts = [to_bytes(shard) for shards in values for shard in shards]
        if there is not None:
            own = [ShardLayout.of_tensor(tensor) for tensor in tensors]
            if not are_alike(own, there):
                sides = zip(values, own, there, strict=True)
                parts = [pack_pieces(shards, x.tiling, far) for shards, x, far in sides]
        self._wire.send(peer, _key(message), None, parts)

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
        if peer == self._wire.rank and not self._wire.has_arrived(ticket):
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


def _check(
    message: Message, peer: int, parts: Sequence[Tensor], expected: list[int]
) -> None:
    got = [part.numel() for part in parts]
    if expected != got:
        raise TransportError(
            f"recv {message.title} from rank {peer}: expected parts of {expected} "
            f"bytes, got {got}. Use the same model, split and schedule on both ranks."
        )
