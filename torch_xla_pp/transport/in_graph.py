"""The transport whose sends and receives are ops of the XLA programs.

`send_op` and `receive_op` put the ops into a graph that is being traced. Each is one
custom call, run by XLA on every local device for its own shard:

    route ─→ custom call "…recv…" ─→ [from shards] ─→ values, token
    route, values ─→ [to shards] ─→ custom call "…send…" ─→ token

A *token* has no meaning, but a program that returns it keeps the op: an op with unused
results would be dropped. The sum of tokens keeps all of their ops.

The *route*, an operand, names the destination and the message, so a program is compiled
once for all microbatches, peers and steps. A part that several devices hold is sent by
one device, and all of the receiver's devices read the one message. Where the peer
shards a value in another way, the route lists the pieces of `mesh.reshard`; each device
then sends its own pieces and takes those that it needs from the messages of all.

Laws:

* torch_xla distinguishes custom calls by the name of their target alone, so every list
of shapes and dtypes has a target of its own.
* A program of this transport never fails. The result of a receive whose message cannot
come is NaN (-1 for integers), and Python raises the failure: in the next call here or
in `settle`, which ends a step. See docs/design/006.
"""

import hashlib
import logging
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_xla_pp import env, native, xla_compat
from torch_xla_pp.errors import TransportError, TransportTimeout
from torch_xla_pp.mesh import Tiling
from torch_xla_pp.native import DIRECTIONS, ROUTE_FIELDS, row_of, words_of
from torch_xla_pp.text import type_text
from torch_xla_pp.transport.pieces import are_alike, piece_table
from torch_xla_pp.transport.rendezvous import Rendezvous
from torch_xla_pp.transport.stage_transport import (
    Message,
    ProgramOps,
    ShardLayout,
    digest,
    no_values,
    not_sent_yet,
)

_CLOSE_S = 5.0
_GRACE_S = 30.0
_NEVER = (1 << 63) - 1
_MAX_READABLE = 160
_TOKEN_SHAPE = (1,)
# Fields of a route on how a message is cut, and on what follows the fields.
_Content = tuple[dict[str, int], list[int]]
_RouteKey = tuple[int, Message, tuple[Any, ...], tuple[Any, ...] | None]

_logger = logging.getLogger(__name__)


def send_op(
    route: Tensor,
    values: Sequence[Tensor],
    layouts: Sequence[ShardLayout],
) -> Tensor:
    """Add the sending of `values` to the graph.

    Args:
        route: The result of `InGraphTransport.send_route`.
        values: What to send.
        layouts: The layouts in which they are sent.

    Returns:
        The token, which the program must return.

    Raises:
        ValueError: A value does not have the shape and dtype of its layout.
    """
    for value, layout in zip(values, layouts, strict=True):
        if (tuple(value.shape), value.dtype) != (layout.shape, layout.dtype):
            raise ValueError(
                f"send: expected {layout}, got {type_text(value.shape, value.dtype)}. "
                "Send what the receiver expects."
            )
    target = _target("send", route, layouts)
    native.register_target(target, "send")
    shards = [
        xla_compat.to_shards(value, layout.sharding)
        for value, layout in zip(values, layouts, strict=True)
    ]
    (token,) = xla_compat.custom_call(
        target, [_whole(route), *shards], [_TOKEN_SHAPE], [torch.int32]
    )
    return _token(token)


def receive_op(
    route: Tensor, layouts: Sequence[ShardLayout]
) -> tuple[list[Tensor], Tensor]:
    """Add the receiving of values to the graph.

    Args:
        route: The result of `InGraphTransport.receive_route`.
        layouts: The layouts of the values.

    Returns:
        The values, and the token, which the program must return.
    """
    target = _target("recv", route, layouts)
    native.register_target(target, "receive")
    *shards, token = xla_compat.custom_call(
        target,
        [_whole(route)],
        [*(layout.shard_shape for layout in layouts), _TOKEN_SHAPE],
        [*(layout.dtype for layout in layouts), torch.int32],
    )
    values = [
        xla_compat.from_shards(shard, layout.sharding, layout.shape, layout.dtype)
        for shard, layout in zip(shards, layouts, strict=True)
    ]
    return values, _token(token)


def _token(token: Tensor) -> Tensor:
    replicated = xla_compat.replicated_sharding()
    return xla_compat.from_shards(token, replicated, _TOKEN_SHAPE, torch.int32)


def _whole(route: Tensor) -> Tensor:
    return xla_compat.to_shards(route, xla_compat.replicated_sharding())


def _alike(layouts: Sequence[ShardLayout]) -> _Content:
    """Return the rest of a route between equally tiled devices."""
    tilings = [layout.tiling for layout in layouts]
    head = {
        "digest": digest(layouts, tilings),
        "num_devices": len(tilings[0].tiles),
        "num_sources": 0,
        "num_levels": 0,
    }
    return head, [owner for tiling in tilings for owner in tiling.owners]


def _in_pieces(
    layouts: Sequence[ShardLayout], there: Sequence[Tiling], *, is_receive: bool
) -> _Content:
    """Return the rest of a route with resharding."""
    tilings = [layout.tiling for layout in layouts]
    source, destination = (there, tilings) if is_receive else (tilings, there)
    depth, rows = piece_table(layouts, there, is_receive=is_receive)
    head = {
        "digest": digest(layouts, source, destination),
        "num_devices": len(tilings[0].tiles),
        "num_sources": len(source[0].tiles),
        "num_levels": depth,
    }
    return head, [*(tile for tiling in tilings for tile in tiling.tiles), *rows]


def _target(kind: str, route: Tensor, layouts: Sequence[ShardLayout]) -> str:
    text = "; ".join([f"route {route.numel()}", *map(str, layouts)])
    if len(text) > _MAX_READABLE:
        text = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return f"torch_xla_pp.{kind}({text})"


def _host_id() -> str:
    """Return a text that is equal for processes that see each other's process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError as error:
        _logger.debug("processes of peers cannot be looked at: %s", error)
        return secrets.token_hex()


class InGraphTransport:
    """The transport inside the XLA programs.

    Args:
        rendezvous: Agreement and errors of the group's ranks.
        token: Secret of the members of the job.

    Raises:
        native.Unavailable: The compiled library cannot be used here.
    """

    name = "in_graph"
    send_op = staticmethod(send_op)
    receive_op = staticmethod(receive_op)

    def __init__(self, rendezvous: Rendezvous, token: bytes) -> None:
        self._rendezvous = rendezvous
        self._num_devices = xla_compat.num_local_devices()
        self.engine = native.Engine(
            rendezvous.rank,
            self._num_devices,
            rendezvous.timeout_s,
            token,
            env.master_host(),
        )
        self._host = _host_id()
        place = (self.engine.address(), self._host, os.getpid())
        rendezvous.publish("address", place)
        rendezvous.join(self)
        self._connected: set[int] = {rendezvous.rank}
        self._generation = rendezvous.generation
        self._routes: dict[_RouteKey, Tensor] = {}
        # The route that each message had last; layouts take longer to hash than to be
        # found the same.
        self._latest: dict[tuple[int, Message], tuple[tuple[Any, ...], Tensor]] = {}
        self._sent: Counter[tuple[int, Message]] = Counter()
        self._received: Counter[tuple[int, Message]] = Counter()

    # Called by the rendezvous.

    def report(self, generation: int, report: str, num_ended: int) -> None:
        """Report to the peers that this rank failed."""
        self.engine.report(generation, report, num_ended)

    def end_step(self, generation: int, num_ended: int) -> None:
        """Let what the step has still to send leave, whatever fails later."""
        self.engine.end_step(generation, num_ended, self._sent.total())

    def end(self, generation: int) -> None:
        """Forget the messages of a generation that this rank leaves."""
        self.engine.advance(generation + 1)

    # Methods of the protocol.

    @property
    def in_program(self) -> ProgramOps:
        """Return self, which has the ops and their routes."""
        return self

    def expect(self, message: Message, peer: int) -> None:
        """Prepare for messages such as `message`, of any microbatch."""
        if peer == self._rendezvous.rank:
            return
        direction = DIRECTIONS.index(message.direction)
        self.engine.expect(peer, direction, message.stage, message.origin)
        self._connect(peer)

    def send(
        self,
        message: Message,
        peer: int,
        tensors: Sequence[Tensor],
        there: Sequence[Tiling] | None = None,
    ) -> None:
        """Enqueue a program that sends `tensors` to group rank `peer`.

        Raises:
            ValueError: There are no tensors.
            TransportError: An earlier message has failed.
        """
        layouts = [ShardLayout.of_tensor(tensor) for tensor in tensors]
        route = self.send_route(message, peer, layouts, there)
        xla_compat.materialize([send_op(route, tensors, layouts)])

    def recv(
        self,
        message: Message,
        peer: int,
        layouts: Sequence[ShardLayout],
        there: Sequence[Tiling] | None = None,
    ) -> list[Tensor]:
        """Enqueue a program that receives the values of `message`, and return them.

        Raises:
            ValueError: There are no layouts.
            TransportError: An earlier message has failed, or `peer` is this rank and
                has not sent the message yet.
        """
        route = self.receive_route(message, peer, layouts, there)
        values, token = receive_op(route, layouts)
        xla_compat.materialize([*values, token])
        return values

    def settle(self) -> None:
        """Wait until all receives have ended.

        Raises:
            TransportError: One of them failed; its values are void.
            TransportTimeout: One of them waited for too long.
            Exception: A peer has reported a failure, see `Rendezvous.check`.
        """
        self.check()
        count = self._received.total()

        def is_settled(limit_s: float) -> bool:
            self.check()
            return self.engine.settle(self._generation, count, limit_s)

        # Each receive has its own time limit, which begins when its program runs.
        limit_s = self._rendezvous.timeout_s + _GRACE_S
        self._rendezvous.wait_until(
            is_settled, limit_s, lambda: "its own device to receive"
        )
        for notice in self.engine.take_notices():
            _logger.warning("rank %d: %s", self._rendezvous.rank, notice)

    def check(self) -> None:
        """Raise failures since the last one that was raised; takes microseconds.

        Raises:
            TransportError: A message of this rank failed.
            Exception: A peer has reported a failure, see `Rendezvous.check`.
        """
        generation = self._rendezvous.generation
        if generation != self._generation:
            self._generation = generation
            self._sent.clear()
            self._received.clear()
            self._routes.clear()
            self._latest.clear()
        failure = self.engine.failure(generation)
        if failure is None:
            return
        if failure.is_report:
            self._rendezvous.receive_report(generation, failure.text, failure.num_ended)
            self._rendezvous.check()
        kind = TransportTimeout if failure.is_timeout else TransportError
        error = kind(failure.text)
        self._rendezvous.report(error)
        raise error

    def send_route(
        self,
        message: Message,
        peer: int,
        layouts: Sequence[ShardLayout],
        there: Sequence[Tiling] | None = None,
    ) -> Tensor:
        """Return the route operand for the next send of `message`."""
        if not layouts:
            raise no_values(message)
        self.check()
        self._connect(peer)
        self._sent[peer, message] += 1
        return self._route(message, peer, layouts, there, is_receive=False)

    def receive_route(
        self,
        message: Message,
        peer: int,
        layouts: Sequence[ShardLayout],
        there: Sequence[Tiling] | None = None,
    ) -> Tensor:
        """Return the route operand for the next receive of `message`."""
        if not layouts:
            raise no_values(message)
        self.check()
        self._connect(peer)
        number = self._received[peer, message]
        if peer == self._rendezvous.rank and number >= self._sent[peer, message]:
            raise not_sent_yet(message)
        self._received[peer, message] += 1
        return self._route(message, peer, layouts, there, is_receive=True)

    def _route(
        self,
        message: Message,
        peer: int,
        layouts: Sequence[ShardLayout],
        there: Sequence[Tiling] | None,
        *,
        is_receive: bool,
    ) -> Tensor:
        """Return the operand for a message, which is uploaded once a generation."""
        asked = layouts, there, is_receive
        known = self._latest.get((peer, message))
        if known is not None and known[0] == asked:
            return known[1]
        here = tuple((x.dtype, x.tiling) for x in layouts)
        far = None if there is None else (is_receive, *there)
        key = (peer, message, here, far)
        if key not in self._routes:
            if there is None or are_alike(layouts, there):
                content = _alike(layouts)
            else:
                content = _in_pieces(layouts, there, is_receive=is_receive)
            self._routes[key] = self._new_route(message, peer, content)
        self._latest[peer, message] = asked, self._routes[key]
        return self._routes[key]

    def _new_route(self, message: Message, peer: int, content: _Content) -> Tensor:
        cut, rest = content
        fields = row_of(
            ROUTE_FIELDS,
            engine=self.engine.id,
            generation=self._generation,
            peer=peer,
            direction=DIRECTIONS.index(message.direction),
            stage=message.stage,
            origin=message.origin,
            microbatch=message.microbatch,
            **cut,
        )
        words = words_of(fields + rest)
        return xla_compat.replicate(torch.tensor(words, dtype=torch.int32))

    def _connect(self, peer: int) -> None:
        if peer in self._connected:
            return
        address, host, pid = self._rendezvous.read("address", peer)
        self.engine.connect(peer, address, pid if host == self._host else 0)
        self._connected.add(peer)

    def close(self) -> None:
        """Wait until enqueued messages are sent and have arrived, and disconnect."""
        self.engine.settle(self._generation, self._received.total(), _CLOSE_S)
        self.engine.advance(_NEVER)
        xla_compat.flush()
        if not self.engine.close(_CLOSE_S):
            _logger.warning(
                "rank %d: not everything that was sent has arrived within %g s",
                self._rendezvous.rank,
                _CLOSE_S,
            )
