"""How the ranks of the tests join their job."""

import os
from unittest import mock

import torch.distributed as dist

from torch_xla_pp.transport import XlaPpProcessGroup, of_group


def join(transport: str = "", **env: str) -> XlaPpProcessGroup:
    """Join the job as a rank of it; workers are reused, so their variables stay.

    Args:
        transport: What must carry messages, the default if empty.
        **env: Environment variables to set meanwhile.
    """
    if transport:
        env["TORCH_XLA_PP_TRANSPORT"] = transport
    with mock.patch.dict(os.environ, env):
        dist.init_process_group("xla_pp")
        group = of_group(None)
        assert transport in ("", group.transport.name)
        return group
