"""What stages on different ranks send each other, device to paired device."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.errors import TransportError
from torch_xla_pp.transport.shards import from_bytes, to_bytes
from torch_xla_pp.transport.wire import Wire


class Message(NamedTuple):
    """Name what one stage sends another for one microbatch.

    Attributes:
        direction: "F" for values, "B" for their gradients.
        stage: Index of the stage that consumes it.
        microbatch: Index of the microbatch.
    """

    direction: Literal["F", "B"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.direction}{self.microbatch}"


class ShardLayout(NamedTuple):
    """Describe a value so that its receiver can build it.

    Attributes:
        shape: Shape of the whole value.
        dtype: Its dtype.
        sharding: Its sharding on the receiver's devices.
        shard_shape: Shape of one device's part, padding included.
        num_shards: Number of parts; 1 if the value is replicated.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: Any
    shard_shape: tuple[int, ...]
    num_shards: int


class Transport:
    """Send and receive the values of stages, through the host.

    Each device's shard goes to the paired device of the peer's world; a replicated
    value travels once. Layouts are agreed on before, so no message describes itself.

    Args:
        wire: Carries the bytes.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def send(self, message: Message, peer: int, tensors: Sequence[Tensor]) -> None:
        """Copy `tensors` out and send them to group rank `peer`.

        Waits until the device has computed them, never for the peer.

        Raises:
            ValueError: `peer` is this rank, whose stages hand values over directly.
            TransportError: The peer is gone.
        """
        if peer == self._wire.rank:
            raise ValueError(
                f"message {message}: expected the group rank of another process, got "
                f"{peer}, this one. Hand the values over without the transport."
            )
        shards = [s for value in xla_compat.read_shards(tensors) for s in value]
        parts = [to_bytes(shard) for shard in shards]
        self._wire.send(peer, ("stage", *message), None, parts)

    def recv(
        self, message: Message, peer: int, layouts: Sequence[ShardLayout]
    ) -> list[Tensor]:
        """Wait for the values of `message` from group rank `peer`.

        Raises:
            TransportError: The message differs from `layouts`, or the peer is gone.
            TransportTimeout: It did not come in time.
        """
        ticket = self._wire.expect(peer, ("stage", *message))
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
            f"message {message} from rank {peer}: expected parts of {expected} bytes, "
            f"got {got}. Use the same mesh, sharding and schedule on both ranks."
        )
