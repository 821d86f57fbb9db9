"""XLA tensors as messages: one part of bytes per device, and a description."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.errors import TransportError
from torch_xla_pp.mesh import parse_sharding
from torch_xla_pp.transport.inbox import Parcel

_REPLICATED = "{replicated}"


class Description(NamedTuple):
    """Describe an XLA tensor so that a peer can rebuild it.

    Attributes:
        shape: Shape of the whole tensor.
        dtype: Its dtype.
        sharding: HLO text of its sharding.
        num_devices: Number of devices of the rank that holds it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: str
    num_devices: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} {self.sharding}"

    @classmethod
    def of(cls, tensor: Tensor) -> "Description":
        """Describe `tensor`; no annotation counts as replicated."""
        text = xla_compat.sharding_texts([tensor])[0] or _REPLICATED
        return cls(
            tuple(tensor.shape), tensor.dtype, text, xla_compat.num_local_devices()
        )

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


def pack(tensor: Tensor) -> tuple[Description, list[Tensor]]:
    """Copy an XLA tensor to the host, a part per device or one if replicated."""
    (shards,) = xla_compat.read_shards([tensor])
    return Description.of(tensor), [to_bytes(shard) for shard in shards]


def unpack(description: Description, parts: Sequence[Tensor]) -> Tensor:
    """Upload what `pack` gave, with the sharding that it describes."""
    shape = description.shard_shape
    shards = [from_bytes(part, shape, description.dtype) for part in parts]
    sharding = xla_compat.sharding_from_args(*parse_sharding(description.sharding))
    return xla_compat.from_local_shards(shards, sharding, description.shape)


def fill(tensor: Tensor, parcel: Parcel, what: str) -> None:
    """Give `tensor` the value of a received parcel, in place.

    A tensor without a sharding takes over the sender's.

    Raises:
        TransportError: Shape, dtype, sharding or number of devices differ.
    """
    sent: Description = parcel.header
    own = Description.of(tensor)
    is_bare = not xla_compat.sharding_texts([tensor])[0]
    wanted = own._replace(sharding=sent.sharding) if is_bare else own
    if sent.sharding == _REPLICATED:
        wanted = wanted._replace(num_devices=sent.num_devices)
    if sent != wanted:
        raise TransportError(
            f"{what}: expected {wanted} on {wanted.num_devices} devices, got {sent} "
            f"from {sent.num_devices} devices. Receive into a tensor of the sender's "
            "shape, dtype and sharding."
        )
    xla_compat.rebind(tensor, unpack(sent, parcel.parts))
