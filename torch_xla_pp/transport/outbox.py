"""Values to be sent from this rank's devices to other ranks.

One thread takes them in the order in which they were put: it waits until the devices
have computed a value, copies it to the host and passes it to the wire. So the program's
own thread goes on to enqueue what comes next, and the values of one message leave
before those of a later one.

Laws:

* Errors on the thread are reported to all ranks, including this one, and raised by
  their next call.
* Values of a step that has failed are dropped, unread.
* The thread ends before the interpreter does, when all that was put has been sent.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.errors import TransportError
from torch_xla_pp.transport.inbox import Key
from torch_xla_pp.transport.rendezvous import Rendezvous
from torch_xla_pp.transport.wire import Wire

Shards = Sequence[Sequence[Tensor]]
"""For each value its shards on the host, or the one that all devices hold."""

Pack = Callable[[Sequence[Tensor], Shards], list[Tensor]]
"""Makes the parts of a message from XLA tensors and their shards, on any thread."""


class _Sending(NamedTuple):
    """One message to be sent: its receiver, its key, and its origin.

    Attributes:
        generation: The generation in which it is sent.
        peer: Rank in the group.
        key: The key by which the peer receives it.
        context: The activity of this rank at that time.
        num_ended: How many steps this rank had ended then.
    """

    generation: int
    peer: int
    key: Key
    context: str
    num_ended: int


class Outbox:
    """Messages to be read from the devices and sent.

    Args:
        wire: Carries the bytes.
        rendezvous: Receives the reports of failures.
    """

    def __init__(self, wire: Wire, rendezvous: Rendezvous) -> None:
        self._wire = wire
        self._rendezvous = rendezvous
        # Python waits for the threads of an executor before it exits.
        self._thread = ThreadPoolExecutor(1, "xla_pp outbox")
        self._last: Future[None] | None = None

    def put(self, peer: int, key: Key, values: Sequence[Tensor], pack: Pack) -> None:
        """Send `values` to group rank `peer` as soon as they are computed.

        Returns when the program that computes them is launched: at once, unless XLA
        runs it in the thread that launches it, as it does with small ones.

        Args:
            peer: The receiver.
            key: The key by which the peer receives them.
            values: XLA tensors; not to be written to, or donated, until the peer has
                them.
            pack: Makes the parts of the message.

        Raises:
            TransportError: The peer is gone.
            Exception: A rank has reported a failure, see `Rendezvous.check`.
        """
        self._wire.check_there(peer, key)
        held = [value.detach() for value in values]
        if any(xla_compat.are_pending(held)):
            xla_compat.materialize(held)
        xla_compat.wait_launched(held[0])
        activity = self._rendezvous.activity
        sending = _Sending(
            self._rendezvous.generation, peer, key, str(activity), activity.num_ended
        )
        self._last = self._thread.submit(self._send, sending, held, pack)

    def flush(self) -> None:
        """Wait until all that was put has been passed to the wire."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Pass all that was put to the wire, and end the thread."""
        self._thread.shutdown()

    # On the thread.

    def _send(self, sending: _Sending, values: Sequence[Tensor], pack: Pack) -> None:
        generation, peer, key, context, num_ended = sending
        has_ended = num_ended < self._rendezvous.activity.num_ended
        if generation != self._rendezvous.generation and not has_ended:
            return
        try:
            shards = [xla_compat.read_ready(value) for value in values]
            self._wire.post(generation, peer, key, None, pack(values, shards))
        except TransportError as error:
            self._rendezvous.fail(generation, error, context)
        except Exception as error:
            what = " ".join(map(str, key))
            failure = TransportError(
                f"send {what}: expected its values from the devices, got "
                f"{type(error).__name__}: {error}. Look for the first error of the "
                "rank that sends."
            )
            self._rendezvous.fail(generation, failure, context)
