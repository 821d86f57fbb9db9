"""Scores of attention are sharded as their queries are, where the length is cut."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_xla_pp import attention, xla_compat
from torch_xla_pp.compile import JointGraph, export_joint
from torch_xla_pp.compile.query_rows import shard_scores
from torch_xla_pp.compile.rank_rules import joint_parts
from torch_xla_pp.graph import SCORES_OF, SHARD, axes_of, shard_in_graph
from torch_xla_pp.mesh import on_mesh
from torch_xla_pp.world import World

pytestmark = pytest.mark.xla

AXIS = on_mesh("data")
BY_ROWS = ["", "", AXIS, ""]


class Attending(nn.Module):
    def __init__(self, axes: list[str]) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query = shard_in_graph(query, *[name or None for name in self.axes])
        return attention(query.sin(), key, value, is_causal=True)


def joint_of(axes: list[str], world: World) -> JointGraph:
    query, key = (
        torch.zeros(2, 2, 6, 4, device=xla_compat.device(), requires_grad=True)
        for _ in range(2)
    )
    joint = export_joint(Attending(axes), [query, key, key], {}, stays=lambda *_: False)
    shard_scores(joint, lambda: joint_parts(world, joint, {}))
    assert not joint.graph.graph.find_nodes(op="call_function", target=SCORES_OF)
    return joint


def constrained(joint: JointGraph) -> list[tuple[int, ...]]:
    """Return the shapes of values that are split by length."""
    nodes = joint.graph.graph.find_nodes(op="call_function", target=SHARD)
    return [
        tuple(node.meta["val"].shape)
        for node in nodes
        if axes_of(node.args[1]) == axes_of(BY_ROWS)
    ]


def test_scores_and_their_gradients_lie_with_the_queries(mesh: Any) -> None:
    joint = joint_of(BY_ROWS, World(mesh, None))
    # Of a forward, of the backward, and the gradients of shares; and both of a query.
    assert sorted(constrained(joint)) == [(2, 2, 6, 4)] * 2 + [(2, 2, 6, 6)] * 3


def test_other_scores_are_left_to_xla(mesh: Any) -> None:
    joint = joint_of(["", AXIS, "", ""], World(mesh, None))
    assert not constrained(joint)
    # Those of a query alone.
    assert len(joint.constraints) == 2


def test_costs_know_no_marks() -> None:
    given = [torch.zeros(2, 2, 6, 4, device=xla_compat.device()) for _ in range(3)]
    joint = export_joint(Attending(BY_ROWS), given, {})
    assert not joint.graph.graph.find_nodes(op="call_function", target=SCORES_OF)
