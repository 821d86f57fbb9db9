"""Values whose memory programs have taken."""

import torch

from torch_xla_pp import xla_compat
from torch_xla_pp.state import DonatedValues
from torch_xla_pp.testing import Worlds


def kept_after_programs() -> tuple[int, int]:
    """Return how many sets are kept after 3 programs that took one, and 23 more."""
    xla_compat.enable_spmd()
    donated = DonatedValues()
    value = xla_compat.replicate(torch.ones(4))
    for _ in range(3):
        xla_compat.materialize([value + 1])
        donated.add([value])
    first = len(donated)
    for _ in range(xla_compat.MAX_IN_FLIGHT - 1):
        xla_compat.materialize([value + 1])
    donated.add([value])
    return first, len(donated)


def test_values_are_kept_while_their_program_may_run(worlds: Worlds) -> None:
    # Only the third of the first ones may run, after 23 others.
    assert worlds.run(kept_after_programs, ranks=1) == [(3, 2)]
