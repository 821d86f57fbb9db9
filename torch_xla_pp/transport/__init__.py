"""Messages between ranks: process group "xla_pp", agreement, errors, transport."""

from torch_xla_pp.transport.in_graph import (
    InGraphTransport,
    receive_op,
    send_op,
)
from torch_xla_pp.transport.process_group import (
    XlaPpProcessGroup,
    of_group,
    register_backend,
)
from torch_xla_pp.transport.rendezvous import Rendezvous, StoreLost
from torch_xla_pp.transport.stage_transport import (
    Direction,
    Message,
    ShardLayout,
    StageTransport,
)

__all__ = [
    "Direction",
    "InGraphTransport",
    "Message",
    "Rendezvous",
    "ShardLayout",
    "StageTransport",
    "StoreLost",
    "XlaPpProcessGroup",
    "of_group",
    "receive_op",
    "send_op",
]

register_backend()
