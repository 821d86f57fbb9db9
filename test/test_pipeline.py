"""Models that cannot be split say why."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint

import torch_xla_pp as xpp

pytestmark = pytest.mark.pure

CUT = {"second": SplitPoint.BEGINNING}


class Two(nn.Module):
    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        if is_tied:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def test_a_split_model_shows_its_stages() -> None:
    pipe = xpp.pipeline(Two(), mb_args=(torch.ones(2, 4),), split_spec=CUT)
    assert pipe.num_stages == 2
    assert str(pipe.stage_graph).splitlines() == [
        "2 stages",
        "  0 stage_0: 20 parameters (80 B), 64 FLOPs",
        "      in  x float32[2, 4]",
        "      out relu_default float32[2, 4]",
        "  1 stage_1: 20 parameters (80 B), 64 FLOPs",
        "      in  relu float32[2, 4]",
        "      out second float32[2, 4]",
        "  0.out0 -> 1.in0  float32[2, 4]  32 B",
    ]


def test_an_unknown_submodule_in_split_spec() -> None:
    with pytest.raises(ValueError, match=r"got unknown \['third'\].*first, second"):
        xpp.pipeline(
            Two(),
            mb_args=(torch.ones(2, 4),),
            split_spec={"third": SplitPoint.BEGINNING},
        )


def test_a_pipe_runs_all_stages_as_upstreams_does() -> None:
    model, x = Two(), torch.ones(2, 4)
    pipe = xpp.pipeline(model, mb_args=(x,), split_spec=CUT)
    (result,) = pipe(x)
    torch.testing.assert_close(result, model(x))


def test_a_model_may_be_a_sequential() -> None:
    """Which upstream refuses."""
    layers = (nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.0), nn.Linear(4, 4))
    model, x = nn.Sequential(*layers), torch.randn(2, 4)
    pipe = xpp.pipeline(model, mb_args=(x,), split_spec={"3": SplitPoint.BEGINNING})
    second = dict(pipe.get_stage_module(1).named_parameters())
    assert {*second} == {"3.weight", "3.bias"}
    assert second["3.weight"] is layers[3].weight
    torch.testing.assert_close(pipe(x)[0], model(x))


def test_an_example_that_is_not_where_the_model_is() -> None:
    x = torch.ones(2, 4, device=xpp.device())
    for model, example in ((Two().to(xpp.device()), x.cpu()), (Two(), x)):
        with pytest.raises(ValueError, match="expected the example on the model's dev"):
            xpp.pipeline(model, mb_args=(example,), split_spec=CUT)


class Choosing(Two):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        return super().forward(x)


class Counting(Two):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Scripted(Two):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.jit.script(self.first)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Choosing, "if x.sum() > 0"),
        (Counting, "attributes that a forward writes"),
        (Scripted, "ScriptModules aren't supported"),
    ],
)
def test_a_model_that_cannot_be_traced_says_why(model: type[Two], reason: str) -> None:
    with pytest.raises(xpp.PipelineError) as caught:
        xpp.pipeline(model(), mb_args=(torch.ones(2, 4),), split_spec=CUT)
    text = str(caught.value)
    assert text.startswith("trace: expected a model that torch.export traces")
    assert reason in text
    assert text.endswith("or cut the stages by hand with PipelineStage.")


def test_split_points_and_a_policy_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="got split_spec and split_policy. Leave"):
        xpp.pipeline(
            Two(),
            mb_args=(torch.ones(2, 4),),
            split_spec=CUT,
            split_policy=lambda traced: traced,
        )


def test_a_parameter_of_two_stages_is_a_fact_of_the_graph() -> None:
    pipe = xpp.pipeline(Two(is_tied=True), mb_args=(torch.ones(2, 4),), split_spec=CUT)
    (shared,) = pipe.stage_graph.shared
    assert (
        str(shared) == "first.weight: first.weight in stage 0, second.weight in stage 1"
    )
    assert pipe.stage_graph.shared_of(1) == {"second.weight": "first.weight"}


class Tied(nn.Module):
    """Two uses of one weight, both before the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.first.weight
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.again(self.first(x)))


def test_a_parameter_used_twice_in_one_stage_stays_one() -> None:
    pipe = xpp.pipeline(Tied(), mb_args=(torch.ones(2, 4),), split_spec=CUT)
    stage = pipe.get_stage_module(0)
    assert stage.first.weight is stage.again.weight
    assert len(list(stage.parameters())) == 3


class Laid(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(xpp.shard(self.first(x), "batch", "mlp"))


def test_edges_know_what_shard_called_their_dimensions() -> None:
    pipe = xpp.pipeline(Laid(), mb_args=(torch.ones(2, 4),), split_spec=CUT)
    (edge,) = pipe.stage_graph.edges
    assert edge.axes == ("batch", "mlp")
    named = pipe.stage_graph.with_shardings(lambda shape, axes: f"{shape} {axes}")
    assert named.edges[0].sharding == "(2, 4) ('batch', 'mlp')"


class Straight(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_outputs_of_submodules_get_axes_while_a_model_is_traced() -> None:
    axes = ("batch", None)
    pipe = xpp.pipeline(
        Straight(),
        mb_args=(torch.ones(2, 4),),
        split_spec=CUT,
        activations={"fir*": axes},
    )
    (edge,) = pipe.stage_graph.edges
    assert edge.axes == axes


def test_patterns_of_activations_must_match_submodules() -> None:
    with pytest.raises(ValueError, match="match submodules of the model, got 'tail'"):
        xpp.pipeline(
            Two(), mb_args=(torch.ones(2, 4),), activations={"tail": (None, None)}
        )
