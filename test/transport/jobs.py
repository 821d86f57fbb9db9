"""What the ranks of the transport's tests share."""

import math

import numpy as np
import torch
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from joining import join
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.transport import XlaPpProcessGroup

Spec = tuple[str | tuple[str, ...] | None, ...]


def start(timeout_s: float = 60.0, transport: str = "") -> XlaPpProcessGroup:
    """Join the job, as a rank of it, under SPMD."""
    xla_compat.enable_spmd()
    return join(transport, TORCH_XLA_PP_TIMEOUT_S=str(timeout_s))


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
    rows = 2 if count % 2 == 0 else count
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


DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def same_draws(count: int) -> settings:
    """Let all ranks draw the same examples, and none again if one fails."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def boundary_values(draw: st.DrawFn) -> list[tuple[Tensor, Spec]]:
    """Draw values of any shape and dtype, with specs over the mesh of this process.

    Sizes need not divide; axes are used at most once; scalars and empty values occur.
    """
    drawn = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 8]), max_size=3))
        names = draw(st.permutations(["a", "b", *[None] * len(shape)]))
        dtype = draw(st.sampled_from(DTYPES))
        spec = names[: len(shape)]
        if 0 in shape:  # torch_xla cannot upload an empty value that is split unevenly
            spec = [n if s % 4 == 0 else None for n, s in zip(spec, shape, strict=True)]
        value = torch.arange(math.prod(shape)).reshape(shape) + draw(st.integers(0, 9))
        drawn.append((value.to(dtype), tuple(spec)))
    return drawn
