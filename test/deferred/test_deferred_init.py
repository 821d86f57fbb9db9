"""Values that are made later are those that were asked for."""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from strategies import tensor_programs
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint

import torch_xla_pp as xpp
from torch_xla_pp.deferred import unwritten, value_of

pytestmark = pytest.mark.pure

STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "new": lambda a, b: torch.arange(16.0).view(4, 4),
    "empty": lambda a, b: torch.empty(4, 4).copy_(b),
    "row": lambda a, b: a[1].copy_(b[2].clone()).new_ones(4, 4),
    "t": lambda a, b: a.t(),
    "clone": lambda a, b: a.clone(),
    "add": lambda a, b: a + b,
    "max": lambda a, b: torch.maximum(a, b).T.contiguous(),
    "add_": lambda a, b: a.add_(b.sum()),
    "copy_": lambda a, b: a.copy_(b.clone()[:1]),
    "fill": lambda a, b: a[:, :1].fill_(3) + b,
    "data": lambda a, b: torch.tensor([[2.0]]) * a,
    "where": lambda a, b: torch.where(a > 3, a, 7.0),
    "item": lambda a, b: a * (1 if b.sum().item() > 20 else 2),
    "list": lambda a, b: a + max(b[0].tolist()),
}


def run(program: Sequence[tuple[str, int, int]]) -> list[Tensor]:
    """Run a program on a list of tensors, which each step adds its result to."""
    values = [torch.arange(16.0).view(4, 4)]
    for name, i, j in program:
        values.append(STEPS[name](values[i % len(values)], values[j % len(values)]))
    return values


@given(tensor_programs(sorted(STEPS)))
def test_what_is_recorded_gives_what_it_gives_at_once(
    program: list[tuple[str, int, int]],
) -> None:
    with xpp.deferred_init():
        later = run(program)
    for value, expected in zip(later, run(program), strict=True):
        assert value.is_meta
        made = value_of(value)
        assert made is not None
        assert torch.equal(made, expected)


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(0.02 * torch.randn(width))
        self.register_buffer("angles", torch.arange(width) / 3, persistent=False)
        self.register_buffer("data", torch.tensor(range(width)), persistent=False)
        nn.init.trunc_normal_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        # There is no autocast for meta.
        with torch.autocast(x.device.type, enabled=False):
            x = self.norm(self.linear(x)) * self.scale
        return x + self.angles.sin() + self.data * torch.tensor([2.0])


class Model(nn.Module):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = nn.Linear(8, 8)
        nn.init.orthogonal_(self.head.weight)
        self.layers[0].linear.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def deferred(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    with xpp.deferred_init():
        return Model()


def state(module: nn.Module) -> dict[str, Tensor]:
    named = dict(module.named_parameters(remove_duplicate=False))
    return named | dict(module.named_buffers())


def test_all_tensors_are_on_meta_until_they_are_made() -> None:
    model = deferred()
    assert all(value.is_meta for value in state(model).values())
    assert xpp.materialize(model) is model
    assert model.head.weight is model.layers[0].linear.weight
    eager = state(Model())
    for name, value in state(model).items():
        assert value.shape == eager[name].shape
        assert value.dtype == eager[name].dtype
        assert value.requires_grad == eager[name].requires_grad
        assert type(value) is type(eager[name])


def test_values_follow_the_initialization_of_the_model() -> None:
    model = xpp.materialize(deferred())
    layer = model.layers[1]
    assert torch.equal(layer.angles, torch.arange(8) / 3)
    assert layer.data.tolist() == list(range(8))
    assert torch.equal(layer.norm.running_var, torch.ones(8))
    bound = 8**-0.5
    assert 0.5 * bound < layer.linear.weight.abs().max() <= bound
    assert layer.scale.abs().max() < 0.1
    product = model.head.weight @ model.head.weight.T
    torch.testing.assert_close(product, torch.eye(8))


def test_values_depend_on_seed_and_name_alone() -> None:
    whole = state(xpp.materialize(deferred()))
    torch.rand(3)  # other random numbers do not matter
    part = nn.Sequential(*deferred().layers[2:])
    for name, value in state(xpp.materialize(part)).items():
        index, _, rest = name.partition(".")
        assert torch.equal(value, whole[f"layers.{int(index) + 2}.{rest}"])
    torch.manual_seed(0)
    with xpp.deferred_init():
        alone = nn.ModuleDict({"layers": nn.ModuleDict({"3": Layer()})})
    for name, value in state(xpp.materialize(alone)).items():
        assert torch.equal(value, whole[name])
    other = state(xpp.materialize(deferred(seed=1)))
    first, second = "layers.2.scale", "layers.3.scale"
    assert not torch.equal(other[first], whole[first])
    assert not torch.equal(whole[first], whole[second])


def test_materializing_leaves_the_random_state_alone() -> None:
    model, before = deferred(), torch.get_rng_state()
    xpp.materialize(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_equal_names_of_several_models_have_values_of_their_own() -> None:
    with xpp.deferred_init():
        blocks = [nn.Linear(4, 4) for _ in range(2)]
    first, second = (xpp.materialize(block).weight for block in blocks)
    assert not torch.equal(first, second)


def test_a_generator_gives_the_seed() -> None:
    def make(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        with xpp.deferred_init():
            module = nn.Linear(4, 4)
            nn.init.normal_(module.weight, generator=generator)
        return xpp.materialize(module).weight

    assert torch.equal(make(1), make(1))
    assert not torch.equal(make(1), make(2))


def test_casts_and_further_initialization_may_come_later() -> None:
    model = deferred()
    with xpp.deferred_init(), torch.no_grad():
        model.to(torch.bfloat16)
        model.layers[1].linear.weight.fill_(2)
        twin = copy.deepcopy(model)
    expected = state(xpp.materialize(deferred()))
    for made in (xpp.materialize(model), xpp.materialize(twin)):
        found = state(made)
        assert (found["layers.1.linear.weight"] == 2).all()
        for name in ("layers.2.linear.weight", "layers.2.scale"):
            assert torch.equal(found[name], expected[name].to(torch.bfloat16))


def test_a_module_of_meta_initializes_itself() -> None:
    with torch.device("meta"):
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with xpp.deferred_init(), torch.no_grad():
        second.weight.fill_(1)
        second.bias.zero_()
    bound = xpp.materialize(first).weight.abs().max()
    assert 0 < bound <= 0.5
    assert (xpp.materialize(second).weight == 1).all()


def test_default_dtype_and_autograd_are_those_of_the_time() -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with xpp.deferred_init():
            module = nn.Linear(4, 4)
            module.register_buffer("third", torch.arange(4) / 3)
    finally:
        torch.set_default_dtype(before)
    xpp.materialize(module)
    assert module.weight.dtype == torch.float64
    assert torch.equal(module.third, torch.arange(4, dtype=torch.float64) / 3)


def test_a_traced_model_stays_on_meta_and_its_stages_keep_their_values() -> None:
    model, x = deferred(), torch.ones(2, 8)
    model.layers[1].scale = nn.Parameter(torch.full((8,), 5.0))  # has its value
    cuts = {f"layers.{i}": SplitPoint.BEGINNING for i in (1, 3)}
    pipes = [xpp.pipeline(model, mb_args=(x,), split_spec=cuts) for _ in range(2)]
    assert not model.layers[1].scale.is_meta
    whole = state(xpp.materialize(model))
    for index in range(3):
        stage = pipes[0].get_stage_module(index)
        # What `forward` makes from data is a constant of the trace.
        held = {n: v for n, v in state(stage).items() if ".lifted_" not in n}
        assert all(v.is_meta for n, v in held.items() if n != "layers.1.scale")
        made = state(xpp.materialize(stage))
        assert all(torch.equal(made[name], whole[name]) for name in held)
    (result,) = pipes[0](x)
    torch.testing.assert_close(result, model(x))


def test_values_that_nothing_gives_are_listed() -> None:
    with xpp.deferred_init():
        module = nn.Linear(4, 4)
        module.extra = nn.Parameter(torch.empty(3))
        module.register_buffer("scale", torch.empty(3))
    assert unwritten(module) == ["extra", "scale"]
    with pytest.raises(xpp.PipelineError, match="on meta without: extra, scale. Build"):
        xpp.materialize(module)


def test_a_cast_outside_is_not_taken_for_an_uninitialized_module() -> None:
    with xpp.deferred_init():
        module = nn.Linear(4, 4)
        nn.init.ones_(module.weight)
    module.to(torch.bfloat16)
    with pytest.raises(xpp.PipelineError, match="without: bias, weight.*cast and copy"):
        xpp.materialize(module)


def test_a_write_outside_is_refused() -> None:
    model = deferred()
    nn.init.ones_(model.head.bias)
    with pytest.raises(xpp.PipelineError, match="writes outside to: head.bias, which"):
        xpp.pipeline(model, mb_args=(torch.ones(2, 8),))


def test_what_cannot_be_recorded_is_refused() -> None:
    with (
        pytest.raises(xpp.PipelineError, match="that can be recorded, got aten"),
        xpp.deferred_init(),
    ):
        value = torch.ones(4)
        value.masked_scatter_(value > 0, torch.from_numpy(np.ones(3, np.int8)))


def test_what_has_a_value_is_changed_at_once() -> None:
    table, source = torch.zeros(3), torch.ones(3)
    with xpp.deferred_init():
        assert table.add_(torch.arange(3)) is table
        module = nn.Linear(3, 1)
        module.weight.data.copy_(source)
    assert table.tolist() == [0, 1, 2]
    assert torch.equal(xpp.materialize(module).weight[0], source)


def test_random_values_of_nothing_are_refused() -> None:
    with (
        pytest.raises(xpp.PipelineError, match="a random value that a module holds"),
        xpp.deferred_init(),
    ):
        torch.rand(3).tolist()


def test_wrong_calls_raise_what_they_always_raise() -> None:
    with pytest.raises(RuntimeError, match="must match"), xpp.deferred_init():
        torch.ones(3) + torch.ones(4)
