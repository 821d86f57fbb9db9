"""The joint graph of a stage is the same if equal layers are repeated, not traced."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torch_xla_pp as xpp
from torch_xla_pp import xla_compat
from torch_xla_pp.compile import JointGraph, export, export_joint
from torch_xla_pp.compile.equal_layers import shorten
from torch_xla_pp.graph import sharding_outputs
from torch_xla_pp.torch_pipe import move_factories_to

pytestmark = pytest.mark.xla

WIDTH, NUM_LAYERS = 4, 9


class Layer(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH, bias=False)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.up(self.norm(x)).relu(), 0.1, self.training)
        return x + self.factor * self.down(hidden)


class Model(nn.Module):
    """Layers between two others.

    Args:
        layers: The layers.
        call: Calls one, with the number of the layer, and what the first one gets.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        call: Callable[[nn.Module, Tensor, int, Tensor], Tensor] = lambda f, x, *_: f(
            x
        ),
    ) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.first(x)
        for index, layer in enumerate(self.layers):
            x = self.call(layer, x, index, first)
        return self.last(x)


def layers_of(make: Callable[[], nn.Module] = Layer) -> list[nn.Module]:
    return [make() for _ in range(NUM_LAYERS)]


def stage_of(model: nn.Module) -> fx.GraphModule:
    pipe = xpp.pipeline(model, (torch.randn(2, 3, WIDTH),))
    stage = pipe.get_stage_module(0).to(xla_compat.device())
    move_factories_to(stage, xla_compat.device())
    return stage


def traced(stage: nn.Module) -> JointGraph:
    x = torch.zeros(2, 3, WIDTH, device=xla_compat.device(), requires_grad=True)
    return export_joint(stage, [x], {})


def text_of(joint: JointGraph) -> list[Any]:
    """Return all that a joint graph says, with values named by roles or in order."""
    names = {node: joint.roles.get(node, "") for node in joint.graph.graph.nodes}
    ops = [node for node in joint.graph.graph.nodes if node.op == "call_function"]
    names |= {op: f"%{index}" for index, op in enumerate(ops)}
    numbers: dict[int | None, int] = {}
    lines: list[Any] = []
    for op in ops:
        shown = fx.map_arg((op.args, op.kwargs), lambda node: f"({names[node]})")
        look = [
            (x.shape, x.dtype, x.stride()) if isinstance(x, Tensor) else x
            for x in torch.utils._pytree.tree_leaves(op.meta.get("val"))
        ]
        region = numbers.setdefault(joint.regions.get(op), len(numbers))
        # Of operations that are no line of a model the trace notes what runs it.
        line = op.meta.get("stack_trace") or ""
        line = line if __file__ in line else ""
        is_saved = op in joint.selected
        lines.append(
            (names[op], str(op.target), str(shown), look, region, is_saved, line)
        )
    pairs = (joint.parameter_grads, joint.buffer_updates, joint.input_grads)
    named = [[(key, names.get(x)) for key, x in found.items()] for found in pairs]
    outputs = [names[node] for node in joint.outputs]
    names_of = [*joint.roles.values()], [*joint.constants]
    return [*lines, *named, outputs, *names_of, joint.output_template]


def check(stage: fx.GraphModule) -> None:
    """Check that layers are repeated, and that this changes nothing."""
    with patch.object(export, "shorten", return_value=None):
        expected = traced(stage)
    with patch.object(export, "_trace", wraps=export._trace) as trace:
        joint = traced(stage)
    (call,) = trace.call_args_list
    assert call.args[-1] is not None
    joint.graph.graph.lint()
    assert text_of(joint) == text_of(expected)


def is_repeated(stage: nn.Module) -> bool:
    shortened = shorten(stage)
    if shortened is None:
        return False
    with patch.object(export, "shorten", return_value=shortened):
        with patch.object(export, "_trace", wraps=export._trace) as trace:
            traced(stage)
    return trace.call_count == 1


def checkpointed(layer: nn.Module, x: Tensor, *_: Any) -> Tensor:
    found: Tensor = checkpoint(layer, x, use_reentrant=False)
    return found


def with_frozen(*names: str) -> Model:
    model = Model(layers_of())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in names))
    return model


class Pair(nn.Module):
    """Two streams, of which a layer reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList(layers_of()[:2])
        self.layers = nn.ModuleList(layers_of())
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        other = x.sin()
        for layer in self.before:
            x = layer(x)
        for layer in self.layers:
            x, other = layer(x + other) * self.scale, x * self.scale
        return x * other


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*heads.chunk(3, -1), is_causal=True)
        return x + self.scale * mixed.transpose(1, 2).flatten(2)


class Regions(Model):
    def __init__(self) -> None:
        super().__init__(
            layers_of(), lambda layer, x, _, first: checkpointed(layer, x) + first
        )
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("norm" not in name)


REPEATED: dict[str, Callable[[], nn.Module]] = {
    "regions of checkpoints, frozen norms, a value that all read": Regions,
    "all layers are frozen": lambda: with_frozen("layers."),
    "all but the last is frozen": lambda: with_frozen("first", "layers."),
    "two lists, two streams and a shared parameter": Pair,
    "numbers in the way, another kind, attention and a buffer": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers_of(Attending)),
    ),
    "two kinds in turn": lambda: Model(
        [Layer(1.0 + index % 2) for index in range(2 * NUM_LAYERS - 1)]
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_layers_are_repeated(name: str) -> None:
    check(stage_of(REPEATED[name]()))


def test_results_may_be_sharded() -> None:
    stage = stage_of(Model(layers_of()))
    axes = ("batch", None, "embed")
    with sharding_outputs(stage, {"layers.?": axes}):
        check(stage)
    with sharding_outputs(stage, {"layers.5": axes}):
        assert not is_repeated(stage)


def test_hooks_are_called() -> None:
    stage, calls = stage_of(Model(layers_of())), []
    for part in stage.modules():
        part.register_forward_hook(lambda *_: calls.append(1))
    assert not is_repeated(stage)
    traced(stage)
    assert calls


def with_one(change: Callable[[Layer], object]) -> Model:
    model = Model(layers_of())
    change(model.layers[5])  # type: ignore[arg-type]
    return model


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x)


TRACED: dict[str, Callable[[], nn.Module]] = {
    "few": lambda: Model(layers_of()[:6]),
    "a constant differs": lambda: with_one(lambda x: setattr(x, "factor", 2.0)),
    "a type of a constant differs": lambda: with_one(lambda x: setattr(x, "factor", 1)),
    "one is frozen": lambda: with_one(lambda x: x.down.requires_grad_(False)),
    "a size differs": lambda: with_one(
        lambda x: (
            setattr(x, "up", nn.Linear(WIDTH, 9)),
            setattr(x, "down", nn.Linear(9, WIDTH)),
        )
    ),
    "a dtype differs": lambda: with_one(lambda x: x.norm.double()),
    "a value of one is read in the end": lambda: Skipping(),
    "buffers are updated": lambda: Model(layers_of(Counting)),
    "constants of each": lambda: Model(
        layers_of(),
        lambda layer, x, index, _: layer(x) + torch.tensor([float(index)] * WIDTH),
    ),
}


class Skipping(Model):
    def __init__(self) -> None:
        super().__init__(layers_of())

    def forward(self, x: Tensor) -> Tensor:
        kept = x
        for index, layer in enumerate(self.layers):
            x = layer(x)
            kept = x if index == 5 else kept
        return self.last(x + kept)


@pytest.mark.parametrize("name", TRACED)
def test_layers_are_traced(name: str) -> None:
    assert not is_repeated(stage_of(TRACED[name]()))


def test_tied_layers_are_traced() -> None:
    stage = stage_of(Model(layers_of()))
    weight = stage.get_parameter("layers.3.up.weight")
    stage.get_submodule("layers.6.up").weight = weight
    assert not is_repeated(stage)


def test_manual_stages_are_traced() -> None:
    assert not is_repeated(Model(layers_of()))
