"""The process-group backend "xla_pp": XLA tensors between SPMD worlds.

CPU tensors and object collectives go to an inner gloo group, as in any CPU job. XLA
tensors go shard by shard: each device's shard to the paired device of the peer's
world, through the host, so that nothing is gathered. Sends never wait for the
receiver; receives and collectives end early when a peer fails.

Law: gloo is called directly, not by torch's own methods of a group. Those of a Python
subclass hold the interpreter's lock, even where nothing is overridden, while they wait
for a lock of gloo's; a thread of gloo may hold that one and wait for the interpreter's
lock to free a tensor.

Collectives on XLA tensors are meant for values such as losses and gradient norms:
every rank sends its shards to every other one, and combines the received ones in the
order of ranks, so that all ranks have the same bits.

torch_xla's own backend "xla" is not usable here: it assumes one world of all
processes and refuses SPMD.
"""

import atexit
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from torch_xla_pp import env, xla_compat
from torch_xla_pp.transport.gloo_compat import (
    AllgatherOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    GroupMaker,
    PrefixStore,
    Store,
    attach_gloo,
    wrap_backend,
)
from torch_xla_pp.transport.inbox import Parcel
from torch_xla_pp.transport.rendezvous import Rendezvous
from torch_xla_pp.transport.shard_bytes import (
    Description,
    assign,
    check_alike,
    fill,
    from_bytes,
    pack,
    reduce_parts,
    to_bytes,
    unpack,
)
from torch_xla_pp.transport.sockets import Sockets
from torch_xla_pp.transport.stage_transport import Message, StageTransport
from torch_xla_pp.transport.table import Carriers, make_transport
from torch_xla_pp.transport.wire import Wire
from torch_xla_pp.transport.work import DoneWork, ReceiveWork

BACKEND = "xla_pp"
_COLLECTIVE = ("collective",)
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")


class XlaPpProcessGroup(dist.ProcessGroup):
    """A group of ranks, each of which is one SPMD world.

    Made by `torch.distributed.init_process_group("xla_pp")` and `new_group`. The tensor
    of a receive is filled when the work is waited for. Messages match by tag and, among
    equals, by order; CPU and XLA tensors never match each other.

    Attributes:
        rendezvous: Agreement and errors of the group's ranks.
        wire: Messages of bytes between them.
        mailbox: Message → slot → value, between stages of this rank.
        unfinished: Communication that other threads of the program have not finished.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        # Without the store: torch refuses it for Python subclasses.
        super().__init__(rank, size)  # type: ignore[call-arg]
        store = PrefixStore(f"{env.launch()}/", store)
        store_of_gloo = PrefixStore("gloo/", store)
        self._gloo = attach_gloo(self, ("cpu", "xla"), store_of_gloo, timeout)
        job_rank = dist.get_rank() if dist.is_initialized() else rank
        self._timeout_s = timeout.total_seconds()
        self._sockets = Sockets(store, rank, size)
        self.rendezvous = Rendezvous(self._sockets, env.timeout_s(), job_rank)
        self.wire = Wire(self._sockets, self.rendezvous)
        self._sockets.open()
        self._closings: list[Callable[[], None]] = [self.wire.close]
        self._close = weakref.finalize(self, _close_all, self._closings)
        self.mailbox: dict[Message, dict[int, Tensor]] = {}
        self.unfinished: set[Future[Any]] = set()
        _groups().add(self)

    @functools.cached_property
    def transport(self) -> StageTransport:
        """Return the transport of the values of stages, made at the first call.

        Raises:
            TransportError: `TORCH_XLA_PP_TRANSPORT` names one that cannot be had.
        """
        made = make_transport(Carriers(self.rendezvous, self.wire, self._sockets.token))
        self._closings.append(made.close)
        return made

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """Return the name that `dist.get_backend` shows."""
        return BACKEND

    def shutdown(self) -> None:
        """Let pending sends arrive and disconnect from the peers.

        Waits for unfinished communication in all groups: all are left together.
        """
        for group in list(_groups()):
            wait(group.unfinished)
        self._close()

    @property
    def is_left(self) -> bool:
        """Return whether this rank has disconnected from the others."""
        return not self._close.alive

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Send tensors to group rank `dst`; returns when they are copied out."""
        if _any_xla(tensors):
            for tensor in tensors:
                self.wire.send(dst, ("p2p", _checked(tag)), *pack(tensor, "send"))
            return DoneWork()
        if dst != self.rank():
            return self._gloo.send(tensors, dst, tag)
        for tensor in tensors:
            data = to_bytes(tensor.detach().clone())
            self.wire.send(dst, ("p2p cpu", _checked(tag)), None, [data])
        return DoneWork()

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        """Receive from group rank `src` into tensors, which the work's wait fills."""
        if _any_xla(tensors):
            tickets = [self.wire.expect(src, ("p2p", _checked(tag))) for _ in tensors]
            finish = functools.partial(_fill_all, tensors, f"recv from rank {src}")
            return ReceiveWork(self.wire, tickets, finish)
        if src != self.rank():
            return self._gloo.recv(tensors, src, tag)
        tickets = [self.wire.expect(src, ("p2p cpu", _checked(tag))) for _ in tensors]
        return ReceiveWork(self.wire, tickets, functools.partial(_copy_all, tensors))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """Receive CPU tensors from the rank that sends first."""
        if _any_xla(tensors):
            raise ValueError(
                "recv: expected a source rank for an XLA tensor, got none. Pass src."
            )
        return self._gloo.recv_anysource(tensors, tag)

    # torch declares overloads of the next three that torch.distributed never calls.
    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], opts: AllreduceOptions | None = None
    ) -> dist.Work:
        """Combine tensors of all ranks, shard by shard, in place."""
        opts = opts or AllreduceOptions()
        if not _any_xla(tensors):
            return self._gloo.allreduce(tensors, opts)
        (tensor,) = tensors
        name = _reduction_name(opts.reduceOp, tensor.dtype)

        def finish(parcels: list[Parcel]) -> None:
            description: Description = parcels[0].header
            parts = [
                reduce_parts(shards, description.dtype, name)
                for shards in zip(*(parcel.parts for parcel in parcels), strict=True)
            ]
            fill(tensor, Parcel(description, parts), "all_reduce")

        return self._share(tensor, f"all_reduce {name}", finish)

    def broadcast(  # type: ignore[override]
        self, tensors: list[Tensor], opts: BroadcastOptions | None = None
    ) -> dist.Work:
        """Give all ranks the root's tensors, shard by shard, in place."""
        opts = opts or BroadcastOptions()
        if not _any_xla(tensors):
            return self._gloo.broadcast(tensors, opts)
        (tensor,) = tensors
        what = "broadcast"
        if self.rank() == opts.rootRank:
            header, parts = pack(tensor, what)
            for peer in self._peers():
                self.wire.send(peer, _COLLECTIVE, header, parts)
            return DoneWork()

        def finish(parcels: list[Parcel]) -> None:
            header: Description = parcels[0].header
            own = header._replace(operation=what)
            check_alike({opts.rootRank: header}, self.rank(), own)
            fill(tensor, parcels[0], what)

        ticket = self.wire.expect(opts.rootRank, _COLLECTIVE)
        return ReceiveWork(self.wire, [ticket], finish)

    def allgather(  # type: ignore[override]
        self,
        output_tensors: list[list[Tensor]],
        input_tensors: list[Tensor],
        opts: AllgatherOptions | None = None,
    ) -> dist.Work:
        """Collect the tensors of all ranks, shard by shard."""
        if not _any_xla(input_tensors):
            options = opts or AllgatherOptions()
            return self._gloo.allgather(output_tensors, input_tensors, options)
        (outputs,), (tensor,) = output_tensors, input_tensors
        finish = functools.partial(_fill_all, outputs, "all_gather")
        return self._share(tensor, "all_gather", finish)

    def _allgather_base(
        self, output: Tensor, tensor: Tensor, opts: AllgatherOptions | None = None
    ) -> dist.Work:
        """Collect the tensors of all ranks into one, along the first dimension."""
        if not _any_xla([tensor]):
            options = opts or AllgatherOptions()
            return self._gloo._allgather_base(output, tensor, options)

        def finish(parcels: list[Parcel]) -> None:
            values = [unpack(parcel.header, parcel.parts) for parcel in parcels]
            assign(output, torch.stack(values).reshape(output.shape))

        return self._share(tensor, "all_gather_into_tensor", finish)

    def barrier(  # type: ignore[override]
        self, opts: BarrierOptions | None = None
    ) -> dist.Work:
        """Wait for all ranks; raise if one is gone."""
        self.rendezvous.meet("barrier", self._timeout_s)
        return DoneWork()

    def allreduce_coalesced(self, *args: Any) -> dist.Work:
        """Combine several CPU tensors of all ranks, in place."""
        return self._gloo.allreduce_coalesced(*args)

    def alltoall_base(self, *args: Any) -> dist.Work:
        """Exchange parts of a CPU tensor."""
        return self._gloo.alltoall_base(*args)

    def reduce_scatter(self, *args: Any) -> dist.Work:
        """Combine CPU tensors of all ranks; each rank gets a part."""
        return self._gloo.reduce_scatter(*args)

    def _share(
        self, tensor: Tensor, what: str, finish: Callable[[list[Parcel]], None]
    ) -> dist.Work:
        """Send a tensor to all ranks; `finish` gets every rank's parcel, by rank.

        All ranks must call with tensors of one shape, dtype and sharding.
        """
        own = Parcel(*pack(tensor, what))
        peers = self._peers()
        for peer in peers:
            self.wire.send(peer, _COLLECTIVE, own.header, own.parts)

        def finish_all(parcels: list[Parcel]) -> None:
            by_rank = dict(zip(peers, parcels, strict=True))
            headers = {rank: parcel.header for rank, parcel in by_rank.items()}
            check_alike(headers, self.rank(), own.header)
            by_rank[self.rank()] = own
            finish([by_rank[rank] for rank in range(self.size())])

        tickets = [self.wire.expect(peer, _COLLECTIVE) for peer in peers]
        return ReceiveWork(self.wire, tickets, finish_all)

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size()) if rank != self.rank()]


@functools.cache
def _groups() -> "weakref.WeakSet[XlaPpProcessGroup]":
    """Return the groups of this process, and report its end to peers.

    An exception that is not caught is reported in all of them, wherever it was raised.
    """
    found: weakref.WeakSet[XlaPpProcessGroup] = weakref.WeakSet()
    before = sys.excepthook

    def leave() -> None:
        for group in list(found):
            group.shutdown()

    # After the thread of the connections was made, so that this runs before that ends.
    atexit.register(leave)

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        activities = [str(group.rendezvous.activity) for group in found]
        context = next(filter(None, activities), "")
        for group in found:
            group.rendezvous.report(error, context)
        before(kind, error, trace)

    sys.excepthook = report
    return found


def _close_all(closings: list[Callable[[], None]]) -> None:
    while closings:
        closings.pop()()


def _fill_all(tensors: list[Tensor], what: str, parcels: list[Parcel]) -> None:
    for tensor, parcel in zip(tensors, parcels, strict=True):
        fill(tensor, parcel, what)


def _copy_all(tensors: list[Tensor], parcels: list[Parcel]) -> None:
    for tensor, parcel in zip(tensors, parcels, strict=True):
        tensor.detach().copy_(from_bytes(parcel.parts[0], tensor.shape, tensor.dtype))


def _any_xla(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.device.type == "xla" for tensor in tensors)


def _checked(tag: int) -> int:
    if tag < 0:
        raise ValueError(f"tag: expected a number from 0 on, got {tag}.")
    return tag


def _reduction_name(op: Any, dtype: torch.dtype) -> str:
    name = next((n for n in _REDUCTIONS if op == getattr(ReduceOp, n)), None)
    if name is None or (name == "AVG" and not dtype.is_floating_point):
        raise ValueError(
            f"all_reduce: expected one of {', '.join(_REDUCTIONS)} (AVG: of floats) "
            f"for an XLA tensor, got {op} of {dtype}. Reduce a CPU copy."
        )
    return name


def of_group(group: dist.ProcessGroup | None) -> XlaPpProcessGroup:
    """Return `group`, or the default group, as one of this backend.

    Raises:
        ValueError: torch.distributed is not initialised, this rank is not in the
            group, or the group has another backend.
    """
    how = 'Call dist.init_process_group("xla_pp") first.'
    if not dist.is_initialized():
        raise ValueError(
            "torch_xla_pp: expected torch.distributed to be initialised, got no "
            f"process group. {how}"
        )
    found = group if group is not None else dist.group.WORLD
    if isinstance(found, XlaPpProcessGroup):
        return found
    if not isinstance(found, dist.ProcessGroup):
        raise ValueError(
            f"torch_xla_pp: expected a group with this rank in it, got one without "
            f"rank {dist.get_rank()}. Use it only on its members."
        )
    raise ValueError(
        f"torch_xla_pp: expected a process group of backend 'xla_pp', got "
        f"{dist.get_backend(group)!r}. {how}"
    )


def explain_backend_xla() -> None:
    """Let errors of backend "xla" under SPMD name the backend to use.

    torch_xla's creator fails with an assertion there; otherwise it is called.
    """

    def explained(make: GroupMaker) -> GroupMaker:
        def make_or_explain(*args: Any) -> dist.ProcessGroup:
            if xla_compat.is_spmd():
                raise ValueError(
                    'init_process_group: backend "xla" does not work under SPMD: it '
                    "takes all processes for one world. Use "
                    'dist.init_process_group("xla_pp").'
                )
            return make(*args)

        return make_or_explain

    wrap_backend("XLA", explained)
