"""Three replicas in one process: what programs hand over is carried by hand."""

from typing import Any

import pytest
import torch
import torch_xla
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import ReplicaMeans
from torch_xla_pp.transport import ShardLayout

pytestmark = pytest.mark.xla

REPLICAS = 3
SHAPES = {"whole": (5, 3), "split": (4, 3), "one": (1,), "half": (2, 2)}


def gradients(mesh: Any, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
    made["half"] = made["half"].bfloat16()
    placed = {name: value.to(xla_compat.device()) for name, value in made.items()}
    for name, value in placed.items():
        split = mesh.get_op_sharding(("data", None))
        whole = xla_compat.replicated_sharding()
        xla_compat.annotate(value, split if name == "split" else whole)
    torch_xla.sync()
    return placed


def test_each_replica_averages_a_share_and_all_get_all(mesh: Any) -> None:
    grads = [gradients(mesh, seed) for seed in range(REPLICAS)]
    layouts = {n: ShardLayout.of_tensor(value) for n, value in grads[0].items()}
    programs = [
        ReplicaMeans(i, REPLICAS, layouts, is_in_graph=False) for i in range(REPLICAS)
    ]
    # float32 of 16 and of half of 12 values on each device, bfloat16 of 4.
    assert [c.shard_shape for c in programs[0].chunks] == [(6,), (2,), (2,)]
    chunks = [p.split(own, {}) for p, own in zip(programs, grads, strict=True)]
    means = {}
    for i, program in enumerate(programs):
        means[i] = program.mean({r: chunks[r][i] for r in range(REPLICAS)}, {})
    for program in programs:
        found = program.join(means, {})
        for name, value in found.items():
            parts = [own[name].cpu().float() for own in grads]
            mean = torch.stack(parts).mean(0).to(value.dtype)
            assert torch.allclose(value.cpu(), mean, rtol=1e-6)
            assert (
                ShardLayout.of_tensor(value).tiling.tiles == layouts[name].tiling.tiles
            )
