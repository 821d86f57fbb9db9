"""Three replicas in one process, with channels that keep what they are given."""

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch_xla
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.channels import Edge
from torch_xla_pp.runtime.gradients.replicas import ReplicaMeans
from torch_xla_pp.transport import Message, ShardLayout

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


class KeptChannel:
    """A channel that keeps its messages; `kept` is (sender, receiver) → messages."""

    border = None

    def __init__(
        self, kept: dict[tuple[int, int], list[list[Tensor]]], own: int, edge: Edge
    ) -> None:
        self.edge = edge
        pair = (own, edge.peer) if edge.is_sent else (edge.peer, own)
        self._messages = kept.setdefault(pair, [])

    def feed(self, microbatch: int) -> dict[str, Tensor]:
        if self.edge.is_sent:
            return {}
        return dict(zip(self.edge.names, self._messages.pop(0), strict=True))

    def drain(self, microbatch: int, values: Mapping[str, Tensor]) -> None:
        self._messages.append([values[name] for name in self.edge.names])


def test_each_replica_averages_a_share_and_all_get_all(mesh: Any) -> None:
    grads = [gradients(mesh, seed) for seed in range(REPLICAS)]
    layouts = {n: ShardLayout.of_tensor(value) for n, value in grads[0].items()}
    kept: dict[tuple[int, int], list[list[Tensor]]] = {}
    programs = [
        ReplicaMeans(
            i,
            REPLICAS,
            layouts,
            Message("S", 0, 0, 0),
            functools.partial(KeptChannel, kept, i),
        )
        for i in range(REPLICAS)
    ]
    # float32 of 16 and of half of 12 values on each device, bfloat16 of 4.
    assert [c.shard_shape for c in programs[0].chunks] == [(6,), (2,), (2,)]
    parts = [p.split(own) for p, own in zip(programs, grads, strict=True)]
    means = [p.mean(part) for p, part in zip(programs, parts, strict=True)]
    for program, own in zip(programs, means, strict=True):
        found = program.join(own)
        assert found.keys() == grads[0].keys()
        for name, value in found.items():
            whole = [grad[name].cpu().float() for grad in grads]
            mean = torch.stack(whole).mean(0).to(value.dtype)
            assert torch.allclose(value.cpu(), mean, rtol=1e-6)
            assert (
                ShardLayout.of_tensor(value).tiling.tiles == layouts[name].tiling.tiles
            )
