"""The transport that copies through the host program.

Fit for every PJRT device. Device shards are read to the host, travel over the group's
wire and are uploaded again; Python waits for both the device and the message.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.errors import TransportError
from torch_xla_pp.transport.inbox import Key
from torch_xla_pp.transport.shards import from_bytes, to_bytes
from torch_xla_pp.transport.stage_transport import (
    Message,
    ShardLayout,
    not_sent_yet,
    require_values,
)
from torch_xla_pp.transport.wire import Wire


class HostTransport:
    """Send and receive the values of stages, through the host.

    A replicated value travels once. Layouts are agreed on before, so no message
    describes itself.

    Args:
        wire: Carries the bytes.
    """

    name = "host"

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def expect(self, message: Message, peer: int) -> None:
        """Do nothing: the wire takes all messages."""

    def settle(self) -> None:
        """Do nothing: values that were received are there."""

    def send(self, message: Message, peer: int, tensors: Sequence[Tensor]) -> None:
        """Copy `tensors` out and send them to group rank `peer`.

        Waits until the device has computed them, never for the peer.

        Raises:
            ValueError: There are no tensors.
            TransportError: The peer is gone.
        """
        require_values(message, tensors)
        shards = [s for value in xla_compat.read_shards(tensors) for s in value]
        parts = [to_bytes(shard) for shard in shards]
        self._wire.send(peer, _key(message), None, parts)

    def recv(
        self, message: Message, peer: int, layouts: Sequence[ShardLayout]
    ) -> list[Tensor]:
        """Wait for the values of `message` from group rank `peer`.

        Raises:
            ValueError: There are no layouts.
            TransportError: The message differs from `layouts`, the peer is gone, or
                the peer is this rank and has not sent it yet.
            TransportTimeout: It did not come in time.
        """
        require_values(message, layouts)
        ticket = self._wire.expect(peer, _key(message))
        if peer == self._wire.rank and not self._wire.has_arrived(ticket):
            raise not_sent_yet(message)
        parts = self._wire.receive(ticket).parts
        _check(message, peer, parts, layouts)
        left = iter(parts)
        return [
            xla_compat.from_local_shards(
                [
                    from_bytes(next(left), layout.shard_shape, layout.dtype)
                    for _ in range(layout.num_shards)
                ],
                layout.sharding,
                layout.shape,
            )
            for layout in layouts
        ]


def _key(message: Message) -> Key:
    return (message.title,)


def _check(
    message: Message,
    peer: int,
    parts: Sequence[Tensor],
    layouts: Sequence[ShardLayout],
) -> None:
    expected = [
        torch.Size(layout.shard_shape).numel() * layout.dtype.itemsize
        for layout in layouts
        for _ in range(layout.num_shards)
    ]
    got = [part.numel() for part in parts]
    if expected != got:
        raise TransportError(
            f"recv {message.title} from rank {peer}: expected parts of {expected} "
            f"bytes, got {got}. Use the same mesh, sharding and schedule on both ranks."
        )
