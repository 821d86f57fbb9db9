"""Values go between any two stages, forward and backward.

Each case is a model cut by hand into stages that form a graph; outputs, losses and
gradients equal those of the stages run in turn by one process. Tolerance 1e-5 of the
largest value, float32, as in test_parity.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils import _pytree as pytree

import torch_xla_pp as xpp
from torch_xla_pp.plan import StageInputs
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

WIDTH = 6
ROWS = 8
NUM_MICROBATCHES = 4
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


@dataclass
class Hidden:
    """What stages exchange in a class of the user."""

    h: Tensor
    mask: Tensor
    note: str | None = None


pytree.register_dataclass(Hidden)


class Layer(nn.Module):
    """A linear layer on what `read` takes out of the arguments."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.linear, *args, **kwargs)


def first(linear: nn.Module, x: Tensor) -> Any:
    return linear(x).tanh()


def add(linear: nn.Module, *values: Tensor) -> Tensor:
    return linear(torch.stack(values).sum(0)).tanh()


def head(linear: nn.Module, *values: Tensor) -> Tensor:
    return linear(torch.cat(values).view(len(values), -1, WIDTH).prod(0))


# A skip over two stages, into stages of several ranks; every value is used twice.
SKIPS = [(first, None), (add, None), (add, [0, 1]), (head, [2, 0, 1])]


def several(linear: nn.Module, x: Tensor) -> Any:
    h = linear(x)
    hidden = Hidden(h=h.sin(), mask=(h > 0), note="positive")
    return {"hidden": hidden, "count": 3, "ids": (h * 4).long(), "unused": h.exp()}


def masked(linear: nn.Module, hidden: Hidden, ids: Tensor) -> Any:
    assert hidden.note == "positive"
    return linear(hidden.h).where(hidden.mask, ids.float() / 8)


def scaled(linear: nn.Module, h: Tensor, rest: dict[str, Any]) -> Any:
    return None, [linear(h) * rest["count"] + rest["hidden"].h]


def last(linear: nn.Module, h: Tensor, *, ids: Tensor) -> Any:
    return {"logits": linear(h) + (ids % 2), "extra": None}


# Trees with integers, booleans, numbers and None; items and keywords; an unused value.
TREES = [
    (several, None),
    (masked, [(0, "hidden"), (0, "ids")]),
    (scaled, [1, 0]),
    (last, {"h": (2, 1), "ids": (0, "ids")}),
]


def unwrapped(linear: nn.Module, h: Any, *, ids: Tensor) -> Any:
    return last(linear, h[0], ids=ids)


TREES[3] = (unwrapped, {"h": (2, 1), "ids": (0, "ids")})

# Two independent branches that read what stage 0 makes, and join.
BRANCHES = [(first, None), (add, [0]), (add, [0]), (head, [1, 2])]

GRAPHS = {"skips": SKIPS, "trees": TREES, "branches": BRANCHES}


def loss_of(output: Any, target: Tensor) -> Tensor:
    logits = output["logits"] if isinstance(output, dict) else output
    return ((logits - target) ** 2).mean()


def run_in_turn(name: str, layers: Sequence[nn.Module], x: Tensor) -> Any:
    """Run all stages in one process."""
    outputs: dict[int, Any] = {}
    for stage, (layer, (_, source)) in enumerate(
        zip(layers, GRAPHS[name], strict=True)
    ):
        inputs = StageInputs.of(stage, source)
        args, kwargs = inputs.arguments(outputs)
        outputs[stage] = layer(*args, *((x,) if stage == 0 else ()), **kwargs)
    return outputs[len(layers) - 1]


def place(schedule: str, rank: int, ranks: int, num_stages: int) -> list[int]:
    if schedule in V_SHAPED:
        return [rank, num_stages - 1 - rank]
    return list(range(rank, num_stages, ranks))


def train(name: str, schedule_name: str, ranks: int, transport: str) -> None:
    """Run two steps and an evaluation; compare with the stages run in turn."""
    join(transport)
    mesh = xpp.init_device_mesh("xla", (ranks, 2), mesh_dim_names=("pp", "data"))
    torch.manual_seed(0)
    layers = [Layer(call) for call, _ in GRAPHS[name]]
    reference = copy.deepcopy(layers)
    rank = mesh.get_local_rank("pp")
    stages = [
        xpp.PipelineStage(
            layers[stage],
            stage,
            len(layers),
            xpp.device(),
            group=mesh.get_group("pp"),
            mesh=mesh["data"],
            inputs_from=GRAPHS[name][stage][1],  # type: ignore[arg-type]
        )
        for stage in place(schedule_name, rank, ranks, len(layers))
    ]
    cls = get_schedule_class(schedule_name)
    driven: Any = stages[0] if len(stages) == 1 else stages
    schedule = cls(driven, NUM_MICROBATCHES, loss_fn=loss_of)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
        losses: list[Tensor] = []
        args = (x,) if any(stage.is_first for stage in stages) else ()
        is_last = any(stage.is_last for stage in stages)
        kwargs = {"target": y, "losses": losses} if is_last else {}
        output = schedule.step(*args, **kwargs)
        expected = []
        for mb_x, mb_y in zip(
            x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True
        ):
            expected.append(run_in_turn(name, reference, mb_x))
            (loss_of(expected[-1], mb_y) / NUM_MICROBATCHES).backward()
        if is_last:
            check_outputs(output, expected)
        for stage in stages:
            named = dict(reference[stage.stage_index].named_parameters())
            for key, parameter in stage.submod.named_parameters():
                check(parameter.grad, named[key].grad)
        for stage in stages:
            stage.submod.zero_grad()
        for layer in reference:
            layer.zero_grad()
        assert stages[0].process_group.mailbox == {}


def check_outputs(output: Any, expected: list[Any]) -> None:
    if isinstance(output, dict):
        assert output["extra"] is None
        output = output["logits"]
        expected = [value["logits"] for value in expected]
    check(output, torch.cat(expected))


def check(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    difference = (got.detach().cpu() - expected.detach()).abs().max()
    assert difference < 1e-5 * expected.detach().abs().max()


class Late(nn.Module):
    """A stage with a value of the previous stage, and others of its rank's batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, h: Tensor, bias: Tensor, *, factor: float, mask: Tensor
    ) -> Tensor:
        return (self.linear(h) + bias).where(mask, factor)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def arguments_on_a_later_rank(schedule_name: str, num_stages: int) -> None:
    join()
    mesh = xpp.init_device_mesh("xla", (2, 1), mesh_dim_names=("pp", "data"))
    torch.manual_seed(0)
    rank = mesh.get_local_rank("pp")
    layers = [plain(), Late(), plain(), plain()][:num_stages]
    reference = copy.deepcopy(layers)
    stages = [
        xpp.PipelineStage(layers[i], i, num_stages, xpp.device(), mesh=mesh["data"])
        for i in range(rank, num_stages, 2)
    ]
    driven: Any = stages[0] if len(stages) == 1 else stages
    cls = get_schedule_class(schedule_name)
    schedule = cls(driven, NUM_MICROBATCHES, loss_fn=loss_of)
    x, y, bias = torch.randn(3, ROWS, WIDTH)
    mask = torch.rand(ROWS, WIDTH) > 0.3
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(bias, factor=0.5, mask=mask, target=y)
    h = reference[1](reference[0](x), bias, factor=0.5, mask=mask)
    for layer in reference[2:]:
        h = layer(h)
    loss_of(h, y).backward()
    for stage in stages:
        named = dict(reference[stage.stage_index].named_parameters())
        for key, parameter in stage.submod.named_parameters():
            check(parameter.grad, named[key].grad)


@pytest.mark.parametrize(("schedule", "count"), [("1F1B", 2), ("Interleaved1F1B", 4)])
def test_a_later_rank_may_pass_arguments(
    worlds: Worlds, schedule: str, count: int
) -> None:
    worlds.run(arguments_on_a_later_rank, ranks=2, devices=1, args=(schedule, count))


def unknown_keyword() -> str:
    join()
    rank = dist.get_rank()
    stage = xpp.PipelineStage(plain(), rank, 2, xpp.device())
    schedule = get_schedule_class("GPipe")(stage, 2)
    try:
        schedule.step(*((torch.ones(4, WIDTH),) if rank == 0 else ()), mask=rank)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_keyword_argument_that_no_stage_takes(worlds: Worlds) -> None:
    for text in worlds.run(unknown_keyword, ranks=2, devices=1):
        assert "expected keyword arguments that stage " in text
        assert "of this rank takes, got mask. Pass them on the rank" in text


TWO_RANKS = [
    ("skips", "Interleaved1F1B", "in_graph"),
    ("skips", "LoopedBFS", "in_graph"),
    ("skips", "InterleavedZeroBubble", "in_graph"),
    ("skips", "ZBVZeroBubble", "in_graph"),
    ("skips", "DualPipeV", "host"),
    ("trees", "Interleaved1F1B", "host"),
    ("trees", "InterleavedZeroBubble", "in_graph"),
    ("trees", "DualPipeV", "in_graph"),
    ("branches", "ZBVZeroBubble", "in_graph"),
    ("branches", "InterleavedZeroBubble", "host"),
]


@pytest.mark.parametrize(("name", "schedule", "transport"), TWO_RANKS)
def test_two_ranks_of_two_stages(
    worlds: Worlds, name: str, schedule: str, transport: str
) -> None:
    worlds.run(train, ranks=2, devices=2, args=(name, schedule, 2, transport))


@pytest.mark.parametrize(
    ("name", "schedule", "transport"),
    [
        ("trees", "1F1B", "in_graph"),
        ("branches", "GPipe", "host"),
    ],
)
def test_four_ranks(worlds: Worlds, name: str, schedule: str, transport: str) -> None:
    worlds.run(train, ranks=4, devices=2, args=(name, schedule, 4, transport))
