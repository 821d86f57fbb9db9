"""One process with two virtual devices, for tests of programs."""

import numpy as np
import pytest
import torch_xla.distributed.spmd as xs

from torch_xla_pp import xla_compat


@pytest.fixture(scope="session")
def mesh() -> xs.Mesh:
    xla_compat.enable_spmd()
    count = xla_compat.num_local_devices()
    return xs.Mesh(np.arange(count), (count,), ("data",))
