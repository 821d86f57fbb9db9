"""Works that are cut apart keep what a stage of them all keeps, views among it."""

from collections.abc import Sequence

import pytest
import torch
from planned_models import Block
from torch import Tensor, fx, nn

import torch_xla_pp as xpp
from torch_xla_pp.compile import model_work
from torch_xla_pp.graph import Atom
from torch_xla_pp.planner import make_plan
from torch_xla_pp.work import WorkGraph

pytestmark = pytest.mark.xla

ATOMS_OF = model_work.atoms_of
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
        return xpp.trace_work(model, args, max_stages=MANY)


def kept_by(work: WorkGraph, stages: Sequence[Sequence[str]]) -> list[int]:
    """Return what each stage of a plan with these operations saves."""
    plan = make_plan(
        work,
        rows=work.rows,
        ranks=2,
        microbatches=(1,),
        remat=("none",),
        schedules=("gpipe",),
        device="v5p",
        stages=stages,
    )
    return [stage.saved_bytes for stage in plan.predicted.stages]


@pytest.mark.parametrize("kind", [Block, Views])
def test_stages_save_each_value_once_wherever_views_are_cut(
    monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module]
) -> None:
    model, args = kind(), (torch.zeros(4, 8, 16),)
    fine = xpp.trace_work(model, args, max_stages=MANY)
    assert any(value.view_of for value in fine.values)
    for border in range(1, len(fine.works), 3):
        whole = in_stages(monkeypatch, model, args, border)
        stages = [work.ops for work in whole.works]
        assert kept_by(fine, stages) == kept_by(whole, stages), border
