"""Messages between ranks: process group "xla_pp", agreement, errors, transport."""

from torch_xla_pp.transport.gloo_compat import forget_group_numbers
from torch_xla_pp.transport.in_graph import InGraphTransport, receive_op, send_op
from torch_xla_pp.transport.inbox import Ticket
from torch_xla_pp.transport.linked_groups import LinkedGroups, end_step
from torch_xla_pp.transport.pieces import part_sizes
from torch_xla_pp.transport.process_group import (
    XlaPpProcessGroup,
    explain_backend_xla,
    of_group,
)
from torch_xla_pp.transport.rendezvous import Rendezvous
from torch_xla_pp.transport.shard_bytes import from_bytes, to_bytes
from torch_xla_pp.transport.stage_transport import (
    Message,
    ProgramOps,
    ShardLayout,
    StageTransport,
)
from torch_xla_pp.transport.steps_ahead import StepsAhead

__all__ = [
    "InGraphTransport",
    "LinkedGroups",
    "Message",
    "ProgramOps",
    "Rendezvous",
    "ShardLayout",
    "StageTransport",
    "StepsAhead",
    "Ticket",
    "XlaPpProcessGroup",
    "end_step",
    "forget_group_numbers",
    "from_bytes",
    "of_group",
    "part_sizes",
    "receive_op",
    "send_op",
    "to_bytes",
]

explain_backend_xla()
