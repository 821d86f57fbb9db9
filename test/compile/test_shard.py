"""`shard` is nothing in eager, an op in graphs, and a layout in programs."""

import dataclasses
from typing import Any

import pytest
import torch
from compile.stages import Compiled, close
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torch_xla_pp import cpu, shard, xla_compat
from torch_xla_pp.compile import Constraints, export_joint
from torch_xla_pp.compile.mesh_parts import MeshParts
from torch_xla_pp.compile.sharded_products import ShardedProducts
from torch_xla_pp.cpu.products import multiply_parts
from torch_xla_pp.graph import SHARD, axes_of, shard_in_graph
from torch_xla_pp.world import World

pytestmark = pytest.mark.xla

SPLIT, WHOLE = "{devices=[1,2]0,1}", "{replicated}"


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = shard(x, None, "embed")
        hidden = shard(self.up(x), None, "mlp").relu()
        return shard(self.down(hidden).to(torch.float64), None, "embed").float()


def constraints(mesh: Any) -> Constraints:
    """Split "mlp" over the devices, and nothing else."""

    def layout(axes: tuple[str | None, ...]) -> Any:
        return mesh.get_op_sharding(tuple("data" if a == "mlp" else None for a in axes))

    return Constraints(layout=layout)


def test_shard_is_the_identity_in_eager() -> None:
    x = torch.ones(2, 3)
    assert shard(x, "batch", None) is x
    assert torch.vmap(lambda row: shard(row, "embed"))(x) is not None
    with torch.device("cpu"):
        assert shard(x, "batch", None) is x
    with pytest.raises(ValueError, match=r"each of the 2 dimensions of shape \[2, 3\]"):
        shard(x, "batch")


def test_shard_is_one_op_of_an_exported_graph() -> None:
    program = torch.export.export(Mlp(), (torch.ones(2, 8),), strict=True)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("torch_xla_pp.shard.default") == 3


def test_the_gradient_is_constrained_as_the_value(mesh: Any) -> None:
    module = Mlp().to(xla_compat.device())
    x = torch.empty(2, 8, device=xla_compat.device(), requires_grad=True)
    joint = export_joint(module, [x], {})
    axes = [axes for axes, _ in joint.constraints]
    assert axes.count((None, "embed")) == 4
    assert axes.count((None, "mlp")) == 2
    assert joint.output_axes == [(None, "embed")]


def test_shard_works_in_checkpoints(mesh: Any) -> None:
    class Region(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda v: shard(v.exp(), "embed", None), x)

    x = torch.empty(2, 8, device=xla_compat.device(), requires_grad=True)
    joint = export_joint(Region(), [x], {})
    assert [axes for axes, _ in joint.constraints] == [("embed", None)] * 2


def test_vmap_leaves_its_dimension_whole() -> None:
    def rows(x: Tensor) -> Tensor:
        return torch.vmap(lambda row: shard_in_graph(row, "embed"), 1, 1)(x)

    graph = make_fx(rows, tracing_mode="fake")(torch.ones(2, 3)).graph
    (node,) = graph.find_nodes(op="call_function", target=SHARD)
    assert axes_of(node.args[1]) == ("embed", None)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_used_whole", [False, True])
def test_values_are_laid_out_and_numbers_stay(mesh: Any, is_used_whole: bool) -> None:
    torch.manual_seed(0)
    eager = Mlp()
    x = torch.randn(4, 8)
    whole = mesh.get_op_sharding((None, None))
    used = {"param:up.weight": whole} if is_used_whole else {}
    compiled = Compiled(
        eager,
        [torch.zeros(4, 8, requires_grad=True)],
        mesh,
        rules=[constraints(mesh)],
        used=used,
    )
    if is_used_whole:
        rows = mesh.get_op_sharding((None, "data"))
        compiled.fixed["param:up.weight"] = compiled.upload(eager.up.weight, rows)
    expected = eager(x)
    expected.sum().backward()
    result = compiled.forward([compiled.upload(x)])
    assert close(result.outputs[0], expected)
    hidden = [value for value in result.live.values() if tuple(value.shape) == (4, 16)]
    assert hidden
    assert set(xla_compat.sharding_texts(hidden)) == {SPLIT}
    result.live["tangent:0"] = compiled.upload(torch.ones(4, 8))
    fixed = {**compiled.fixed, **compiled.zero_sums()}
    _, sums = compiled.programs.backward(fixed, result.live)
    for name, parameter in eager.named_parameters():
        assert close(sums[f"sum:param:{name}"], parameter.grad), name


def test_without_rules_nothing_is_laid_out(mesh: Any) -> None:
    compiled = Compiled(Mlp(), [torch.zeros(4, 8, requires_grad=True)], mesh)
    result = compiled.forward([compiled.upload(torch.randn(4, 8))])
    hidden = [value for value in result.live.values() if tuple(value.shape) == (4, 16)]
    assert SPLIT not in xla_compat.sharding_texts(hidden)


class Attention(nn.Module):
    """Products over merged dimensions: linear layers with a bias, and attention.

    It begins with what needs no input: positions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(3.0, device=x.device)
        x = x + positions.unsqueeze(1)
        q, k, v = self.qkv(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


# Name of a parameter → the axis that splits each dimension.
BY_ROWS: dict[str, tuple[str | None, ...]] = {}
BY_HEADS = {
    "qkv.weight": ("data", None),
    "qkv.bias": ("data",),
    "out.weight": (None, "data"),
}


def check_attention(mesh: Any, rule: Constraints, split: dict[str, Any]) -> None:
    """Compare outputs and gradients; without split weights the batch is split."""
    torch.manual_seed(0)
    eager = Attention()
    x = torch.randn(2, 3, 8, requires_grad=True)
    weight = torch.randn(2, 3, 8)
    compiled = Compiled(eager, [x], mesh, rules=[rule])
    for name, partition in split.items():
        sharding = mesh.get_op_sharding(partition)
        value = eager.get_parameter(name)
        compiled.fixed[f"param:{name}"] = compiled.upload(value, sharding)
    expected = eager(x)
    (expected * weight).sum().backward()
    sharding = compiled.whole if split else None
    result = compiled.forward([compiled.upload(x, sharding)])
    assert close(result.outputs[0], expected)
    result.live["tangent:0"] = compiled.upload(weight, sharding)
    fixed = {**compiled.fixed, **compiled.zero_sums()}
    grads, sums = compiled.programs.backward(fixed, result.live)
    assert close(grads[0], x.grad)
    for name, parameter in eager.named_parameters():
        assert close(sums[f"sum:param:{name}"], parameter.grad), name


def test_products_with_dimensions_kept_apart_are_the_same(mesh: Any) -> None:
    check_attention(mesh, constraints(mesh), BY_ROWS)


# How many, rows, depth, columns, and whether a factor is stored turned around.
LINEAR_BY_ROWS = "1.3.8.24.0.1.2/datax3x24"
SUM_OF_HEADS = "1.6.4.8.0.1.2/datax2x3x8"


@pytest.mark.parametrize(
    ("split", "expected"), [(BY_ROWS, LINEAR_BY_ROWS), (BY_HEADS, SUM_OF_HEADS)]
)
def test_a_library_multiplies_what_each_device_has(
    mesh: Any,
    split: dict[str, Any],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_XLA_PP_PRODUCTS", "openblas")
    assert cpu.library_product_of_parts.__wrapped__() is multiply_parts
    world, targets = World(mesh, None), []

    def noted(*args: Any) -> Tensor | None:
        result = multiply_parts(*args)
        targets.append(".".join([*(str(int(side)) for side in args[2]), args[4]]))
        return result

    parts = MeshParts(
        local=world.local,
        layout=world.layout.constraint,
        sharding=world.sharding,
        partitions_of=world.partitions_of,
    )
    products = ShardedProducts(multiply=noted, mesh=parts)
    rule = dataclasses.replace(constraints(mesh), products=products)
    check_attention(mesh, rule, split)
    # Of two linear layers and of attention's two products, forward and backward, where
    # scores are computed again. One is multiplied again with its bias.
    assert len(targets) == 14
    assert expected in targets
