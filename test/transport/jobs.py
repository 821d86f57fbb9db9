"""What the ranks of the transport's tests share."""

import os

import numpy as np
import torch
import torch.distributed as dist
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.transport import XlaPpProcessGroup, of_group

Spec = tuple[str | tuple[str, ...] | None, ...]


def start(timeout_s: float = 60.0) -> XlaPpProcessGroup:
    """Join the job, as a rank of it."""
    xla_compat.enable_spmd()
    os.environ["TORCH_XLA_PP_TIMEOUT_S"] = str(timeout_s)
    dist.init_process_group("xla_pp")
    del os.environ["TORCH_XLA_PP_TIMEOUT_S"]
    return of_group(None)


def gathers() -> int:
    """Count the programs that collected a sharded value to read it.

    They are compiled for every read, unlike the programs of the user. The counter
    ReplicateShardedData also counts reads of replicated values, which need none.
    """
    compiled, own = (
        met.counter_value(name) or 0
        for name in ("CreateCompileHandles", "UncachedCompile")
    )
    return compiled - own


def mesh() -> xs.Mesh:
    count = xla_compat.num_local_devices()
    rows = min(count, 2)
    return xs.Mesh(np.arange(count), (rows, count // rows), ("a", "b"))


def on_device(value: Tensor, spec: Spec | None = None) -> Tensor:
    """Upload a value, split by `spec` or without any annotation."""
    tensor = value.to("xla")
    if spec is not None:
        xs.mark_sharding(tensor, mesh(), spec)
    return tensor


def assert_same(tensor: Tensor, expected: Tensor) -> None:
    """Compare two XLA tensors shard by shard, and their shardings."""
    kind = [xla_compat.is_replicated(t) for t in (tensor, expected)]
    assert kind[0] == kind[1]
    if not kind[0]:
        texts = xla_compat.sharding_texts([tensor, expected])
        assert texts[0] == texts[1]
    assert tensor.dtype == expected.dtype
    assert tensor.shape == expected.shape
    pairs = xla_compat.read_shards([tensor, expected])
    for got, want in zip(*pairs, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
