"""Traced models whose stages form a graph train as one process.

Tolerance 1e-5 of the largest value, float32, as in test_parity.
"""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.distributed.pipelining.schedules import get_schedule_class

import torch_xla_pp as xpp
from torch_xla_pp.schedule import dag_1f1b
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

WIDTH = 6
ROWS = 8
NUM_MICROBATCHES = 4


class Skipping(nn.Module):
    """Layers with long skips; a scale used by two stages; a mask for the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        a = self.layers[0](x).tanh() * self.scale
        b = self.layers[1](a).tanh()
        c = self.layers[2](b + a).tanh()
        d = self.layers[3](c + a) * self.scale + b
        return {"logits": d.where(mask, x), "early": b.exp(), "none": None}


class Branches(nn.Module):
    """Independent branches of one input, joined at the end."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = xpp.pipeline_yield(self.stem(x).tanh(), name="stem")
        ends = [
            xpp.pipeline_yield(branch(x).sin(), name=f"branch {i}")
            for i, branch in enumerate(self.branches)
        ]
        return self.head(torch.stack(ends).prod(0))


@dataclass(frozen=True)
class Case:
    """What to train on how many ranks; no schedule stands for the DAG's own one."""

    model: str
    ranks: int = 2
    schedule: str = ""
    transport: str = "in_graph"


def make(case: Case) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    rows = ROWS // NUM_MICROBATCHES
    x = torch.zeros(rows, WIDTH)
    if case.model == "skipping":
        model: nn.Module = Skipping()
        spec = {f"layers.{i}": SplitPoint.BEGINNING for i in (1, 2, 3)}
        mask = torch.ones(rows, WIDTH, dtype=torch.bool)
        return model, lambda m: xpp.pipeline(m, (x,), {"mask": mask}, spec)
    model = Branches(int(case.model.split()[0]))
    return model, lambda m: xpp.pipeline(m, (x,))


def loss_of(output: Any, target: Tensor) -> Tensor:
    if isinstance(output, dict):
        assert output["none"] is None
        return ((output["logits"] - target) ** 2).mean() + output["early"].mean()
    return ((output - target) ** 2).mean()


def place(case: Case, pipe: xpp.Pipe) -> dict[int, int]:
    if case.schedule in ("ZBVZeroBubble", "DualPipeV"):
        half = pipe.num_stages // 2
        return {s: min(s, 2 * half - 1 - s) for s in range(pipe.num_stages)}
    return {s: s % case.ranks for s in range(pipe.num_stages)}


def train(case: Case) -> int:
    """Run two steps; return how many microbatches a stage kept at most."""
    join(case.transport)
    mesh = xpp.init_device_mesh("xla", (case.ranks, 2), mesh_dim_names=("pp", "data"))
    model, split = make(case)
    reference = copy.deepcopy(model)
    pipe = split(model)
    placement = place(case, pipe)
    rank = mesh.get_local_rank("pp")
    stages = [
        pipe.build_stage(stage, xpp.device(), mesh.get_group("pp"), mesh=mesh["data"])
        for stage in range(pipe.num_stages)
        if placement[stage] == rank
    ]
    assert "(data, None)" in str(pipe.stage_graph)
    if case.schedule:
        driven: Any = stages[0] if len(stages) == 1 else stages
        cls = get_schedule_class(case.schedule)
        schedule = cls(driven, NUM_MICROBATCHES, loss_fn=loss_of)
    else:
        table = dag_1f1b(pipe.stage_graph.pairs, placement, NUM_MICROBATCHES)
        schedule = xpp.ScheduleFromTable(stages, table, loss_fn=loss_of)
    for step in range(2):
        run_step(case, schedule, stages, reference, step)
    return max(stage.peak_memory().num_live for stage in stages)


def run_step(
    case: Case, schedule: Any, stages: list[Any], reference: nn.Module, step: int
) -> None:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
    batch: dict[str, Tensor] = {}
    if case.model == "skipping":
        batch = {"mask": torch.rand(ROWS, WIDTH, generator=generator) > 0.3}
    is_first = any(stage.is_first for stage in stages)
    is_last = any(stage.is_last for stage in stages)
    losses: list[Tensor] = []
    kwargs: dict[str, Any] = {"target": y, "losses": losses} if is_last else {}
    given = batch if is_first else {}
    output = schedule.step(*((x,) if is_first else ()), **given, **kwargs)
    expected = []
    for i in range(NUM_MICROBATCHES):
        cut = slice(2 * i, 2 * i + 2)
        expected.append(reference(x[cut], **{k: v[cut] for k, v in batch.items()}))
        loss = loss_of(expected[-1], y[cut])
        (loss / NUM_MICROBATCHES).backward()
        if is_last:
            check("loss", losses[i], loss)
    if is_last and isinstance(output, dict):
        for key in ("logits", "early"):
            check(key, output[key], torch.cat([value[key] for value in expected]))
    elif is_last:
        check("output", output, torch.cat(expected))
    named = dict(reference.named_parameters())
    for stage in stages:
        for key, parameter in stage.submod.named_parameters():
            check(key, parameter.grad, named[key].grad)
        stage.submod.zero_grad()
    reference.zero_grad()


def check(what: str, got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None, what
    assert expected is not None, what
    difference = (got.detach().cpu() - expected.detach()).abs().max()
    assert difference < 1e-5 * expected.detach().abs().max(), what


@pytest.mark.parametrize(
    "case",
    [
        Case("skipping", schedule="Interleaved1F1B"),
        Case("skipping", schedule="LoopedBFS", transport="host"),
        Case("skipping", schedule="InterleavedZeroBubble"),
        Case("skipping", schedule="ZBVZeroBubble"),
        Case("skipping", schedule="DualPipeV"),
        Case("skipping"),
        Case("2 branches"),
        Case("4 branches", transport="host"),
    ],
    ids=str,
)
def test_two_ranks(worlds: Worlds, case: Case) -> None:
    worlds.run(train, ranks=2, devices=2, args=(case,))


def test_four_ranks_of_one_stage(worlds: Worlds) -> None:
    case = Case("skipping", ranks=4, schedule="1F1B")
    worlds.run(train, ranks=4, devices=2, args=(case,))


def test_branches_keep_no_more_than_the_path_from_them_is_long(worlds: Worlds) -> None:
    """Stem, branch, head are three stages deep; both branches run side by side."""
    case = Case("2 branches", ranks=4)
    assert worlds.run(train, ranks=4, devices=2, args=(case,)) == [3, 2, 2, 1]
