"""What works take is measured by running them as stages of one rank."""

import pytest
import torch
import torch.distributed as dist
from planned_models import GPT, ROWS, batch_of
from torch import Tensor
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.planner import MeasuredCosts
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.to(output.device).flatten())


def measure(num_ranks: int) -> MeasuredCosts | str:
    """Measure a small model; returns the error of several ranks."""
    dist.init_process_group("xla_pp")
    model, args = GPT(1), batch_of("gpt")
    before = [parameter.clone() for parameter in model.parameters()]
    work = xpp.trace_work(model, args, max_stages=4)
    options = {"loss_fn": loss_fn, "target": args[0]}
    if num_ranks > 1:
        groups = [dist.new_group([rank], backend="xla_pp") for rank in range(num_ranks)]
        options["group"] = groups[dist.get_rank()]
        xpp.measure_work(work, model, args, rows=[ROWS], steps=1, **options)
        del options["group"]
        with pytest.raises(ValueError, match="expected one process, got 2") as error:
            xpp.measure_work(work, model, args, **options)
        return str(error.value)
    with pytest.raises(ValueError, match=rf"rows from 1 to {ROWS}, .* got \[9\]"):
        xpp.measure_work(work, model, args, rows=[9], **options)
    found = xpp.measure_work(work, model, args, rows=[2, ROWS], steps=3, **options)
    assert all(map(torch.equal, model.parameters(), before))
    plan = xpp.make_plan(work, rows=8 * ROWS, ranks=2, costs=found)
    assert plan.costs.source == "measured on cpu with 2, 4 rows"
    assert {x.digest for x in found.works} == {x.digest for x in work.works}
    return found


def test_works_are_measured_and_planned_with(worlds: Worlds) -> None:
    (found,) = worlds.run(measure, ranks=1, args=(1,), timeout_s=300)
    assert MeasuredCosts.from_json(found.to_json()) == found
    assert found.rows == (2, ROWS)
    # Together they took longer than the start of as many programs, as the whole does.
    lines = [line for x in found.works for line in (x.forward, x.backward)]
    assert max(line.of(ROWS) for line in lines) > 0


def test_several_ranks_need_a_group_each(worlds: Worlds) -> None:
    texts = worlds.run(measure, ranks=2, args=(2,), timeout_s=300)
    assert len(texts) == 2
