"""Messages between ranks: process group "xla_pp", agreement, errors, transport."""

from torch_xla_pp.transport import recording
from torch_xla_pp.transport.clock import clock_offset_ns
from torch_xla_pp.transport.in_graph import InGraphTransport, receive_op, send_op
from torch_xla_pp.transport.inbox import Ticket
from torch_xla_pp.transport.pieces import part_sizes
from torch_xla_pp.transport.process_group import (
    XlaPpProcessGroup,
    of_group,
    register_backend,
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
    "Message",
    "ProgramOps",
    "Record",
    "Rendezvous",
    "ShardLayout",
    "StageTransport",
    "Ticket",
    "XlaPpProcessGroup",
    "clock_offset_ns",
    "of_group",
    "part_sizes",
    "receive_op",
    "recording",
    "register_backend",
    "send_op",
]

register_backend()
