"""The transports that there are, and the choice among them.

To add one, write its class (see `stage_transport.StageTransport`) and add a line to
`TRANSPORTS`.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch_xla_pp import env
from torch_xla_pp.errors import TransportError
from torch_xla_pp.native import Unavailable
from torch_xla_pp.transport.host import HostTransport
from torch_xla_pp.transport.in_graph import InGraphTransport
from torch_xla_pp.transport.rendezvous import Rendezvous
from torch_xla_pp.transport.stage_transport import StageTransport
from torch_xla_pp.transport.wire import Wire

_logger = logging.getLogger(__name__)


class Carriers(NamedTuple):
    """The parts of a process group that a transport may be built on.

    Attributes:
        rendezvous: Agreement and errors of the group's ranks.
        wire: Messages of bytes between them.
        token: Secret of the members of the job.
    """

    rendezvous: Rendezvous
    wire: Wire
    token: bytes


TRANSPORTS: Mapping[str, Callable[[Carriers], StageTransport]] = {
    "in_graph": lambda group: InGraphTransport(group.rendezvous, group.token),
    "host": lambda group: HostTransport(group.wire, group.rendezvous),
}
"""Name → constructor of the transport for a group, the best first.

A constructor whose transport is not available raises `native.Unavailable`.
"""


def make_transport(group: Carriers) -> StageTransport:
    """Return the transport that the user chose, or else the best available one.

    Raises:
        TransportError: `TORCH_XLA_PP_TRANSPORT` names one that is not available.
    """
    wanted = env.transport(TRANSPORTS)
    for name in [wanted] if wanted else TRANSPORTS:
        try:
            return TRANSPORTS[name](group)
        except Unavailable as reason:
            if name == wanted:
                raise TransportError(
                    f"TORCH_XLA_PP_TRANSPORT={name}: {reason}. Unset it to send "
                    "through the host."
                ) from reason
            _warn_of_next(str(reason))
    raise TransportError("transport: none of the table can be had.")


@functools.cache
def _warn_of_next(reason: str) -> None:
    """Warn once why the slower transport is used."""
    _logger.warning(
        "Stages send through the host, which is slower than from inside their "
        "programs, because %s.",
        reason,
    )
