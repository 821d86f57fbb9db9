"""What a stage holds on each device during a step.

Counted are parameters, buffers, gradients, what optimizers keep for the parameters,
what microbatches wait with, and what the program that runs needs beside its arguments.
Programs of a device run one after another, in the order in which they were enqueued, so
all of that is known when they are. Not counted are the batch, what other programs than
the stage's need (an optimizer's, say), and messages that have arrived before the
program that receives them.
"""

import gc
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from torch_xla_pp.compile import device_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """The most that a stage held on one device in a step.

    Args:
        num_live: Microbatches between their forward and the end of their backward.
        saved_bytes: The most that was held between two programs: saved values of those
            microbatches, gradients of losses, and outputs that were kept.
        state_bytes: Parameters, buffers, gradients and their sums.
        active_bytes: The most that was held while a program ran, and all that this
            program takes: its temporaries and results.
        optimizer_bytes: What optimizers keep for the parameters now.
    """

    num_live: int
    saved_bytes: int
    state_bytes: int
    active_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Return all that was held at most."""
        running = max(self.active_bytes, self.saved_bytes)
        return self.state_bytes + self.optimizer_bytes + running

    def __str__(self) -> str:
        peak, state, optimizer, active, saved = (
            f"{count / 2**20:.1f}"
            for count in (
                self.peak_bytes,
                self.state_bytes,
                self.optimizer_bytes,
                max(self.active_bytes, self.saved_bytes),
                self.saved_bytes,
            )
        )
        return (
            f"{peak} MiB on a device: {state} of parameters, buffers and gradients, "
            f"{optimizer} of optimizers, {active} in programs and between them, where "
            f"up to {self.num_live} microbatches saved {saved}"
        )


def optimizer_bytes(parameters: Iterable[Tensor]) -> int:
    """Return what all optimizers of this process keep for parameters on one device.

    Looks at every object of the process for that, which takes a tenth of a second.
    """
    optimizers = [x for x in gc.get_objects() if issubclass(type(x), Optimizer)]
    kept = [
        value
        for parameter in parameters
        for optimizer in optimizers
        if parameter in optimizer.state
        for value in tree_leaves(optimizer.state[parameter])
    ]
    on_device = [x for x in kept if isinstance(x, Tensor) and x.device.type == "xla"]
    return sum(device_bytes(on_device))
