"""The XLA device of a rank."""

import torch

from torch_xla_pp import cpu, xla_compat


def device() -> torch.device:
    """Return the device that stands for all XLA devices of this rank.

    Switches the process to SPMD at the first call, which must come before any other
    use of torch_xla. The launch decides how many devices a rank has: on a CPU machine
    by `CPU_NUM_DEVICES`, one if it is not set.
    """
    with cpu.starting():
        xla_compat.enable_spmd()
    return xla_compat.device()
