"""Messages between ranks: process group "xla_pp", agreement, errors, transport."""

from torch_xla_pp.transport import recording
from torch_xla_pp.transport.gloo_compat import forget_group_numbers
from torch_xla_pp.transport.in_graph import InGraphTransport, receive_op, send_op
from torch_xla_pp.transport.inbox import Ticket
from torch_xla_pp.transport.linked_groups import LinkedGroups
from torch_xla_pp.transport.pieces import part_sizes
from torch_xla_pp.transport.process_group import (
    XlaPpProcessGroup,
    explain_backend_xla,
    of_group,
)
from torch_xla_pp.transport.recording import Event, Record
from torch_xla_pp.transport.rendezvous import Rendezvous
from torch_xla_pp.transport.stage_transport import (
    Direction,
    Message,
    ProgramOps,
    ShardLayout,
    StageTransport,
)

__all__ = [
    "Direction",
    "Event",
    "InGraphTransport",
    "LinkedGroups",
    "Message",
    "ProgramOps",
    "Record",
    "Rendezvous",
    "ShardLayout",
    "StageTransport",
    "Ticket",
    "XlaPpProcessGroup",
    "forget_group_numbers",
    "of_group",
    "part_sizes",
    "receive_op",
    "recording",
    "send_op",
]

explain_backend_xla()
