"""What stages on different ranks send each other, and who may carry it.

Two transports keep the same protocol. `in_graph` sends from inside the XLA programs,
`host` copies through the host program; a device's shard goes to the paired device of
the peer's world in both.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.errors import TransportError
from torch_xla_pp.mesh import OpShardingArgs, parse_sharding

Direction = Literal["F", "B", "S"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


class Message(NamedTuple):
    """Name what one stage sends another for one microbatch.

    Attributes:
        direction: "F" for values, "B" for their gradients, "S" for gradient sums of
            shared parameters.
        stage: Index of the stage that consumes it.
        microbatch: Index of the microbatch.
        origin: Index of the stage that makes it.
    """

    direction: Direction
    stage: int
    microbatch: int
    origin: int

    def __str__(self) -> str:
        return f"{self.stage}{self.direction}{self.microbatch}"

    @property
    def title(self) -> str:
        """Return the name with its parts in words."""
        stage, microbatch = self.stage, self.microbatch
        return (
            f"{self} (stage {stage}, microbatch {microbatch}, from stage {self.origin})"
        )


class ShardLayout(NamedTuple):
    """Describe a value so that its receiver can build it.

    Attributes:
        shape: Shape of the whole value.
        dtype: Its dtype.
        sharding: Its sharding on the receiver's devices.
        shard_shape: Shape of one device's part, padding included.
        tiles: For each device, which part of the value it holds.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: Any
    shard_shape: tuple[int, ...]
    tiles: tuple[int, ...]

    @classmethod
    def of_sharding(
        cls, shape: Sequence[int], dtype: torch.dtype, args: OpShardingArgs
    ) -> "ShardLayout":
        """Lay a value out over this rank's devices.

        Raises:
            ValueError: The sharding is not one over all local devices.
        """
        return cls(
            shape=tuple(shape),
            dtype=dtype,
            sharding=xla_compat.sharding_from_args(*args),
            shard_shape=args.shard_shape(shape),
            tiles=args.tile_of_device(xla_compat.num_local_devices()),
        )

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> "ShardLayout":
        """Describe an XLA tensor as it lies; no annotation counts as replicated."""
        (text,) = xla_compat.sharding_texts([tensor])
        return cls.of_sharding(tensor.shape, tensor.dtype, parse_sharding(text))

    @property
    def num_shards(self) -> int:
        """Return the number of devices that hold something of their own."""
        return len(self.tiles) if any(self.tiles) else 1

    @property
    def owners(self) -> tuple[int, ...]:
        """Return for each device the lowest one that holds the same part."""
        return tuple(self.tiles.index(tile) for tile in self.tiles)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)} as {list(self.shard_shape)}"


def digest(layouts: Sequence[ShardLayout]) -> int:
    """Return a number that differs where two ranks lay values out differently."""
    parts = [(v.shape, str(v.dtype), v.shard_shape, v.tiles) for v in layouts]
    data = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(data, "big", signed=True)


class StageTransport(Protocol):
    """Carry the values of stages to other ranks.

    Messages match by name and, among equals, by order, however they arrive. Sends
    never wait for the receiver. Errors may be raised later than by the call that they
    concern, at the latest by `settle`.
    """

    name: str

    def expect(self, message: Message, peer: int) -> None:
        """Make ready for messages such as `message` from group rank `peer`.

        They may differ from it by the microbatch.
        """

    def send(self, message: Message, peer: int, tensors: Sequence[Tensor]) -> None:
        """Send `tensors` to group rank `peer`.

        Raises:
            ValueError: There are none, or the transport cannot carry them.
            TransportError: The peer is gone.
        """

    def recv(
        self, message: Message, peer: int, layouts: Sequence[ShardLayout]
    ) -> list[Tensor]:
        """Return the values of `message` from group rank `peer`, perhaps pending.

        Raises:
            TransportError: The message differs from `layouts`, the peer is gone, or
                the peer is this rank and has not sent it yet.
            TransportTimeout: It did not come in time.
        """

    def settle(self) -> None:
        """Wait until all values that were asked for are there.

        Raises:
            TransportError: One of them did not come; what was computed from it is
                void.
            Exception: A peer has reported a failure, see `Rendezvous.check`.
        """


def require_values(message: Message, values: Sequence[Any]) -> None:
    """Refuse a message without values.

    Raises:
        ValueError: Names it.
    """
    if not values:
        raise ValueError(
            f"message {message.title}: expected at least one value, got none. Send "
            "only what the other stage takes."
        )


def not_sent_yet(message: Message) -> TransportError:
    """Return the error for a receive from oneself that would wait for ever."""
    return TransportError(
        f"recv {message.title} from this rank: expected it to be sent before, got no "
        "send yet. A device runs its programs in order, so it cannot wait for what it "
        "does later: order the schedule's actions by their data."
    )
