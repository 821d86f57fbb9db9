"""The process-group backend "xla_pp": XLA tensors between SPMD worlds.

CPU tensors and object collectives go to an inner gloo group, as in any CPU job. XLA
tensors go shard by shard: each device's shard to the paired device of the peer's
world, through the host, so that nothing is gathered. Sends never wait for the
receiver.

torch_xla's own backend "xla" is not usable here: it assumes one world of all
processes and refuses SPMD.
"""

import pickle
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
)

from torch_xla_pp import env, xla_compat
from torch_xla_pp.errors import TransportError
from torch_xla_pp.transport.inbox import Key, Parcel
from torch_xla_pp.transport.rendezvous import Rendezvous
from torch_xla_pp.transport.shards import (
    Description,
    fill,
    from_bytes,
    pack,
    to_bytes,
    unpack,
)
from torch_xla_pp.transport.stage_transport import Message, Transport
from torch_xla_pp.transport.wire import Wire

BACKEND = "xla_pp"
_DESCRIPTION_BYTES = 1024


class _Done(dist.Work):
    """An operation that ended before it returned."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Receiving(dist.Work):
    """A receive; the tensors are filled when it is waited for."""

    def __init__(
        self, wire: Wire, peer: int, key: Key, tensors: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self._wire = wire
        self._what = f"recv from rank {peer}"
        self._left = [(wire.expect(peer, key), tensor) for tensor in tensors]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds() or None
        while self._left:
            ticket, tensor = self._left[0]
            parcel = self._wire.receive(ticket, seconds)
            self._left.pop(0)
            if tensor.device.type == "xla":
                fill(tensor, parcel, self._what)
            else:
                tensor.copy_(_host_tensor(parcel))
        return True

    def is_completed(self) -> bool:
        return all(self._wire.has_arrived(ticket) for ticket, _ in self._left)


class XlaPpProcessGroup(dist.ProcessGroup):
    """Group of ranks, each of which is one SPMD world.

    Made by `torch.distributed.init_process_group("xla_pp")` and `new_group`.

    Attributes:
        rendezvous: Agreement and errors of the group's ranks.
        transport: Sends the values of pipeline stages.
        mailbox: Values that stages of this rank hand over to each other.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        super().__init__(rank, size)
        gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo/", store), rank, size, timeout
        )
        kind = dist.ProcessGroup.BackendType.GLOO
        for device in ("cpu", "xla"):
            self._register_backend(torch.device(device), kind, gloo)
        self._set_default_backend(kind)
        self._gloo = gloo
        self.rendezvous = Rendezvous(store, rank, size, env.timeout_s())
        self._wire = Wire(store, self.rendezvous)
        self._close = weakref.finalize(self, self._wire.close)
        self.transport = Transport(self._wire)
        self.mailbox: dict[Message, list[Tensor]] = {}

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """Return the name that `dist.get_backend` shows."""
        return BACKEND

    def shutdown(self) -> None:
        """Let pending sends arrive and part from the peers."""
        self._close()

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Send XLA tensors shard by shard; returns when they are copied out."""
        if dst != self.rank() and not _any_xla(tensors):
            return super().send(tensors, dst, tag)
        for tensor in tensors:
            if tensor.device.type == "xla":
                header, parts = pack(tensor)
                self._wire.send(dst, ("p2p", tag), header, parts)
            else:
                description = (tuple(tensor.shape), tensor.dtype)
                self._wire.send(
                    dst, ("p2p", tag), description, [to_bytes(tensor.clone())]
                )
        return _Done()

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        """Receive into tensors, which are filled by the work's `wait`."""
        if src != self.rank() and not _any_xla(tensors):
            return super().recv(tensors, src, tag)
        return _Receiving(self._wire, src, ("p2p", tag), tensors)

    def allreduce(
        self, tensors: list[Tensor], opts: AllreduceOptions | None = None
    ) -> dist.Work:
        """Combine tensors of all ranks, shard by shard, in place."""
        opts = opts or AllreduceOptions()
        if not _any_xla(tensors):
            return super().allreduce(tensors, opts)
        for tensor in tensors:
            description, shards = self._shards(tensor, "all_reduce")
            for shard in shards:
                self._gloo.allreduce([shard], opts).wait()
            _refill(tensor, description, shards)
        return _Done()

    def broadcast(
        self, tensors: list[Tensor], opts: BroadcastOptions | None = None
    ) -> dist.Work:
        """Give all ranks the root's tensors, shard by shard, in place."""
        opts = opts or BroadcastOptions()
        if not _any_xla(tensors):
            return super().broadcast(tensors, opts)
        for tensor in tensors:
            description, shards = self._shards(tensor, "broadcast")
            for shard in shards:
                # As bytes, since gloo has no bool.
                self._gloo.broadcast([to_bytes(shard)], opts).wait()
            _refill(tensor, description, shards)
        return _Done()

    def allgather(
        self,
        output_tensors: list[list[Tensor]],
        input_tensors: list[Tensor],
        opts: AllgatherOptions | None = None,
    ) -> dist.Work:
        """Collect the tensors of all ranks, shard by shard."""
        opts = opts or AllgatherOptions()
        if not _any_xla(input_tensors):
            return super().allgather(output_tensors, input_tensors, opts)
        for outputs, tensor in zip(output_tensors, input_tensors, strict=True):
            description, shards = self._shards(tensor, "all_gather")
            gathered: list[list[Tensor]] = [[] for _ in outputs]
            for shard in shards:
                data = to_bytes(shard)
                parts = [torch.empty_like(data) for _ in outputs]
                self._gloo.allgather([parts], [data]).wait()
                for into, part in zip(gathered, parts, strict=True):
                    into.append(part)
            for output, parts in zip(outputs, gathered, strict=True):
                fill(output, Parcel(description, parts), "all_gather")
        return _Done()

    def _shards(self, tensor: Tensor, what: str) -> tuple[Description, list[Tensor]]:
        """Return a tensor's shards, having compared its description on all ranks."""
        description = Description.of(tensor)
        found = self._descriptions(description)
        if len(set(found)) > 1:
            raise TransportError(
                f"{what}: expected the same shape, dtype and sharding on every rank, "
                f"got {', '.join(map(str, found))}. Mark the tensors alike."
            )
        return description, xla_compat.read_shards([tensor])[0]

    def _descriptions(self, own: Description) -> list[Description]:
        data = torch.zeros(_DESCRIPTION_BYTES, dtype=torch.uint8)
        pickled = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        data[: len(pickled)] = pickled
        gathered = [torch.empty_like(data) for _ in range(self.size())]
        self._gloo.allgather([gathered], [data]).wait()
        return [pickle.loads(part.numpy().tobytes()) for part in gathered]


def _refill(tensor: Tensor, description: Description, shards: list[Tensor]) -> None:
    value = unpack(description, [to_bytes(shard) for shard in shards])
    xla_compat.rebind(tensor, value)


def _host_tensor(parcel: Parcel) -> Tensor:
    shape, dtype = parcel.header
    return from_bytes(parcel.parts[0], shape, dtype)


def _any_xla(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.device.type == "xla" for tensor in tensors)


def of_group(group: dist.ProcessGroup | None) -> XlaPpProcessGroup:
    """Return `group`, or the default group, as one of this backend.

    Raises:
        ValueError: torch.distributed is not initialised, or the group has another
            backend.
    """
    how = 'Call dist.init_process_group("xla_pp") first.'
    if not dist.is_initialized():
        raise ValueError(
            "torch_xla_pp: expected torch.distributed to be initialised, got no "
            f"process group. {how}"
        )
    found = group if group is not None else dist.group.WORLD
    if not isinstance(found, XlaPpProcessGroup):
        raise ValueError(
            f"torch_xla_pp: expected a process group of backend 'xla_pp', got "
            f"{dist.get_backend(group)!r}. {how}"
        )
    return found


def register_backend() -> None:
    """Make "xla_pp" known to torch.distributed, and "xla" explain itself."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND, XlaPpProcessGroup, devices=["cpu", "xla"]
        )
        _explain_backend_xla()


def _explain_backend_xla() -> None:
    """Let backend "xla" under SPMD say which backend to use.

    torch_xla's creator fails with an assertion there; otherwise it is called.
    """
    plugin = dist.Backend._plugins["XLA"]

    def create(*args: Any) -> dist.ProcessGroup:
        if xla_compat.is_spmd():
            raise ValueError(
                "init_process_group: expected a backend that works under SPMD, got "
                "'xla'. Use dist.init_process_group(\"xla_pp\")."
            )
        return plugin.creator_fn(*args)

    dist.Backend._plugins["XLA"] = plugin._replace(creator_fn=create)
