"""Messages between stages on different ranks, and the protocol of their transports.

All transports keep one protocol; `transport.table` lists them. `in_graph` sends from
inside the XLA programs, `host` copies through the host program. In both, a device's
shard goes to the paired device of the peer's world where both shard a value in the same
way, and otherwise in the pieces that `mesh.reshard` plans.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.errors import TransportError
from torch_xla_pp.hlo import OpShardingArgs, parse_sharding
from torch_xla_pp.mesh import Tiling
from torch_xla_pp.native import Direction
from torch_xla_pp.text import type_text


class Message(NamedTuple):
    """The name of a message from one stage to another for one microbatch.

    Attributes:
        direction: "F" for values, "B" for their gradients, "S" for sums of gradients:
            of tied parameters in other stages, and of replicas of the stage.
        stage: Index of the stage that receives it.
        microbatch: Index of the microbatch.
        origin: Index of the stage that sends it.
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
    """The layout of a value, from which its receiver can build it.

    Attributes:
        dtype: Its dtype.
        sharding: Its sharding on this rank's devices.
        tiling: The part of it that each of these devices holds.
    """

    dtype: torch.dtype
    sharding: Any
    tiling: Tiling

    @classmethod
    def of_sharding(
        cls, shape: Sequence[int], dtype: torch.dtype, args: OpShardingArgs
    ) -> "ShardLayout":
        """Return the layout of a value over this rank's devices.

        Raises:
            ValueError: The sharding is not one over all local devices.
        """
        return cls(
            dtype=dtype,
            sharding=xla_compat.sharding_from_args(*args),
            tiling=args.tiling(shape, xla_compat.num_local_devices()),
        )

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> "ShardLayout":
        """Describe an XLA tensor as it is; no annotation counts as replicated."""
        (text,) = xla_compat.sharding_texts([tensor])
        return cls.of_sharding(tensor.shape, tensor.dtype, parse_sharding(text))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole value."""
        return self.tiling.shape

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Return the shape of one device's part, padding included."""
        return self.tiling.shard_shape

    def __str__(self) -> str:
        return f"{type_text(self.shape, self.dtype)} as {list(self.shard_shape)}"


def digest(layouts: Sequence[ShardLayout], *tilings: Sequence[Tiling]) -> int:
    """Return a number that differs if two ranks disagree on a message's layout.

    Args:
        layouts: Layouts of the values on this rank, of which only the dtypes count.
        *tilings: Tilings on the sender and, if different, on the receiver.
    """
    sides = [[(x.shape, x.grid, x.tiles) for x in side] for side in tilings]
    parts = [str(layout.dtype) for layout in layouts], sides
    data = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(data, "big", signed=True)


class ProgramOps(Protocol):
    """The ops by which a program sends and receives, and the routes that they take.

    A program is traced once; the *route*, an operand of its ops, names the message and
    its destination in each call.
    """

    def send_op(
        self, route: Tensor, values: Sequence[Tensor], layouts: Sequence[ShardLayout]
    ) -> Tensor:
        """Add the sending of `values` to the graph.

        Returns:
            The token, which the program must return.
        """

    def receive_op(
        self, route: Tensor, layouts: Sequence[ShardLayout]
    ) -> tuple[list[Tensor], Tensor]:
        """Add the receiving of values to the graph.

        Returns:
            The values, and the token, which the program must return.
        """

    def send_route(
        self,
        message: Message,
        peer: int,
        layouts: Sequence[ShardLayout],
        there: Sequence[Tiling] | None = None,
    ) -> Tensor:
        """Return the operand for the next send of `message`, see `StageTransport`."""

    def receive_route(
        self,
        message: Message,
        peer: int,
        layouts: Sequence[ShardLayout],
        there: Sequence[Tiling] | None = None,
    ) -> Tensor:
        """Return the operand for the next receive of `message`."""


class StageTransport(Protocol):
    """A transport of the values of stages to other ranks.

    Messages match by name and, among equals, by order, however they arrive. Sends never
    wait for the receiver. Errors may be raised by later calls than the one that they
    concern, at the latest by `settle`.

    Attributes:
        name: Its name in `transport.table`.
    """

    name: str

    @property
    def in_program(self) -> ProgramOps | None:
        """Return the ops by which programs send and receive, None if they do not."""

    def expect(self, message: Message, peer: int) -> None:
        """Prepare for messages such as `message` from group rank `peer`.

        They may differ from it in the microbatch.
        """

    def send(
        self,
        message: Message,
        peer: int,
        tensors: Sequence[Tensor],
        there: Sequence[Tiling] | None = None,
    ) -> None:
        """Send `tensors` to group rank `peer`.

        Args:
            message: Their name.
            peer: The receiver.
            tensors: The values.
            there: Their tilings on the peer's devices, None for those they have here.

        Raises:
            ValueError: There are none, or the transport cannot carry them.
            TransportError: The peer is gone.
        """

    def recv(
        self,
        message: Message,
        peer: int,
        layouts: Sequence[ShardLayout],
        there: Sequence[Tiling] | None = None,
    ) -> list[Tensor]:
        """Return the values of `message` from group rank `peer`, perhaps pending.

        Args:
            message: Their name.
            peer: The sender.
            layouts: Their layouts on this rank's devices.
            there: Their tilings on the peer's, None if they are the same.

        Raises:
            TransportError: The message differs from `layouts`, the peer is gone, or
                the peer is this rank and has not sent it yet.
            TransportTimeout: It did not come in time.
        """

    def settle(self) -> None:
        """Wait until all received values are there.

        Raises:
            TransportError: One of them did not come; values computed from it are void.
            Exception: A peer has reported a failure, see `Rendezvous.check`.
        """

    def close(self) -> None:
        """Disconnect from the peers, after messages have had time to arrive."""


def no_values(message: Message) -> ValueError:
    """Return the error for a message without values."""
    return ValueError(
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
