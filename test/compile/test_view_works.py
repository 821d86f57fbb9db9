"""Works that are cut apart keep what a stage of them all keeps, views among it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from planned_models import Block
from torch import Tensor, fx, nn
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.compile import atom_costs, model_work
from torch_xla_pp.graph import Atom
from torch_xla_pp.planner import make_plan
from torch_xla_pp.work import WorkGraph

pytestmark = pytest.mark.xla

ATOMS_OF, EXPORT = model_work.atoms_of, atom_costs.export_joint
# So many that each operation is a work of its own.
MANY = 1000


class Views(nn.Module):
    """Keeps parts of a value, a value with a view of it, and makes a copy of one."""

    def __init__(self) -> None:
        super().__init__()
        self.halves, self.b = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        g, h = self.halves(x).tanh().chunk(2, -1)
        t = torch.relu(self.b(torch.sigmoid(g) * self.b(h)))
        copied = t.transpose(1, 2).reshape(t.shape)
        return (t.transpose(1, 2) @ t).sum(-1) + copied.exp().sum((1, 2))[:, None]


class Heads(nn.Module):
    """Attention over parts of one product, which are strided unless they are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 12)).transpose(1, 2)
        y = F.scaled_dot_product_attention(*heads.chunk(3, -1), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)) + x


class Nested(nn.Module):
    """Keeps a part of a part of a value, and another part."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.out = nn.Linear(16, 64), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.whole(x).chunk(2, -1)
        left, right = one.chunk(2, -1)
        return self.out(left.exp() + right.sin()) + torch.cos(other[..., :16])


def export_received(module: nn.Module, examples: Sequence[Tensor], more: object) -> Any:
    """Trace a stage; what it receives is contiguous."""
    with torch.no_grad():
        received = [
            x.new_empty(x.shape).requires_grad_(x.requires_grad) for x in examples
        ]
    return EXPORT(module, received, more)  # type: ignore[arg-type]


def in_stages(
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    args: tuple[Tensor, ...],
    border: int,
) -> WorkGraph:
    """Trace a model as two works, each of them traced as a stage is."""

    def two(traced: fx.GraphModule, *rest: object, max_stages: int) -> object:
        atoms = ATOMS_OF(traced, *rest, max_stages=max_stages)  # type: ignore[arg-type]
        for part in (atoms[:border], atoms[border:]):
            ops, runs = (
                tuple(sorted({op for atom in part for op in of(atom)}))
                for of in (lambda atom: atom.ops, lambda atom: atom.runs)
            )
            yield Atom(ops=ops, runs=runs)

    with monkeypatch.context() as patch:
        patch.setattr(model_work, "atoms_of", lambda *a, **b: tuple(two(*a, **b)))
        patch.setattr(atom_costs, "export_joint", export_received)
        return xpp.trace_work(model, args, max_stages=MANY)


def held_by(work: WorkGraph, stages: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """Return what each stage of a plan with these operations saves, and passes to W."""
    plan = make_plan(
        work,
        rows=work.rows,
        ranks=2,
        microbatches=(1,),
        remat=("none",),
        schedules=("zb1p",),
        device="v5p",
        stages=stages,
    )
    return [(stage.saved_bytes, stage.passed_bytes) for stage in plan.predicted.stages]


@pytest.mark.parametrize(
    ("kind", "step"), [(Block, 3), (Views, 3), (Heads, 1), (Nested, 1)]
)
def test_stages_keep_the_fewest_bytes_wherever_views_are_cut(
    monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], step: int
) -> None:
    model, args = kind(), (torch.zeros(4, 8, 16),)
    fine = xpp.trace_work(model, args, max_stages=MANY)
    assert any(value.view_of for value in fine.values)
    for border in range(1, len(fine.works), step):
        whole = in_stages(monkeypatch, model, args, border)
        stages = [work.ops for work in whole.works]
        assert held_by(fine, stages) == held_by(whole, stages), border
