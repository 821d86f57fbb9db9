"""XLA tensors as messages: one part of bytes per device, and a description."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.errors import TransportError
from torch_xla_pp.hlo import parse_sharding
from torch_xla_pp.text import type_text
from torch_xla_pp.transport.inbox import Parcel

_REPLICATED = "{replicated}"


class Description(NamedTuple):
    """The metadata with which a peer can rebuild an XLA tensor.

    Attributes:
        operation: The operation of the sender; collectives compare it.
        shape: Shape of the whole tensor.
        dtype: Its dtype.
        sharding: HLO text of its sharding.
        num_devices: Number of devices of the rank that holds it.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: str
    num_devices: int

    def __str__(self) -> str:
        kind = type_text(self.shape, self.dtype)
        return f"{kind} {self.sharding} on {self.num_devices} devices"

    @classmethod
    def of(cls, tensor: Tensor, operation: str) -> "Description":
        """Describe `tensor`; no annotation counts as replicated."""
        text = xla_compat.sharding_texts([tensor])[0] or _REPLICATED
        num_devices = xla_compat.num_local_devices()
        return cls(operation, tuple(tensor.shape), tensor.dtype, text, num_devices)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Return the shape of one device's part, padding included."""
        return parse_sharding(self.sharding).shard_shape(self.shape)


def to_bytes(shard: Tensor) -> Tensor:
    """Return the bytes of a CPU tensor, without a copy if it is contiguous."""
    return shard.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the CPU tensor that has these bytes, without a copy."""
    return data.view(dtype).reshape(tuple(shape))


def pack(tensor: Tensor, operation: str) -> tuple[Description, list[Tensor]]:
    """Copy an XLA tensor to the host, a part per device or one if replicated."""
    # The sharding of a pending value is known only once it has been computed.
    (shards,) = xla_compat.read_shards([tensor])
    return Description.of(tensor, operation), [to_bytes(shard) for shard in shards]


def unpack(description: Description, parts: Sequence[Tensor]) -> Tensor:
    """Upload the result of `pack`, with the sharding that it describes."""
    shape = description.shard_shape
    shards = [from_bytes(part, shape, description.dtype) for part in parts]
    sharding = xla_compat.sharding_from_args(*parse_sharding(description.sharding))
    return xla_compat.from_local_shards(shards, sharding, description.shape)


def fill(tensor: Tensor, parcel: Parcel, what: str) -> None:
    """Write the value of a received parcel into `tensor`.

    A tensor that is not split gets the sender's sharding.

    Raises:
        TransportError: Shape, dtype, sharding or number of devices differ.
    """
    sent: Description = parcel.header
    own = Description.of(tensor, sent.operation)
    wanted = own
    if own.sharding == _REPLICATED:
        wanted = wanted._replace(sharding=sent.sharding)
    if sent.sharding == _REPLICATED:
        wanted = wanted._replace(num_devices=sent.num_devices)
    if sent != wanted:
        raise TransportError(
            f"{what}: expected {own}, got {sent}. Use a tensor of the sender's shape, "
            "dtype and sharding."
        )
    assign(tensor, unpack(sent, parcel.parts))


def assign(tensor: Tensor, value: Tensor) -> None:
    """Write `value` into `tensor`, with its sharding, on the device.

    It copies, as `tensor` may be a parameter, `parameter.data` or a part of another
    tensor: exchanging the buffers behind it would not change the others. The program
    that copies is compiled once for each shape and sharding. A value that does not
    divide evenly becomes replicated: no XLA program has outputs split in that way.
    """
    with torch.no_grad():
        tensor.copy_(value)
    xla_compat.materialize([tensor])


def check_alike(others: Mapping[int, Description], rank: int, own: Description) -> None:
    """Check that all ranks run the same operation on tensors of one kind.

    Args:
        others: Descriptions of other ranks, by rank.
        rank: Rank of this process.
        own: Its own description.

    Raises:
        TransportError: They differ.
    """
    if all(other == own for other in others.values()):
        return
    seen = {rank: own, **others}
    listed = ", ".join(f"rank {r}: {seen[r].operation} {seen[r]}" for r in sorted(seen))
    raise TransportError(
        f"{own.operation}: expected the same operation, shape, dtype and sharding on "
        f"every rank, got {listed}. Call it on all ranks, with tensors marked alike."
    )


def reduce_parts(parts: Sequence[Tensor], dtype: torch.dtype, name: str) -> Tensor:
    """Combine the bytes of equal shards of several ranks, in the order given.

    Args:
        parts: One rank's shard each, as bytes.
        dtype: The dtype of the shards.
        name: SUM, AVG, PRODUCT, MIN or MAX. Half-precision sums are accumulated in
            float32; a sum of bools is "any", their product "all".
    """
    values = torch.stack([part.view(dtype) for part in parts])
    if name == "MIN" or (name == "PRODUCT" and dtype == torch.bool):
        return to_bytes(values.amin(0))
    if name == "MAX" or (name == "SUM" and dtype == torch.bool):
        return to_bytes(values.amax(0))
    if name == "PRODUCT":
        return to_bytes(values.prod(0, dtype=dtype))
    if name == "AVG":
        return to_bytes(values.mean(0, dtype=dtype))
    return to_bytes(values.sum(0, dtype=dtype))
