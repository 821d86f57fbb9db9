"""Classes of torch.distributed that it exports without telling type checkers."""

from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

__all__ = [
    "AllgatherOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "PrefixStore",
    "ProcessGroupGloo",
    "Store",
]
