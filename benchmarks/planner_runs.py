"""What the benchmarks of plans share: measured costs, given stages, recorded steps.

Ranks have one device; `measure` and `record` are called in each. A batch is what a
model takes, and targets.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median, quantiles
from typing import Any

import gpt
import sides
import torch.distributed as dist
from pinning import check_pinned
from torch import Tensor, nn

from torch_xla_pp.planner import MeasuredCosts, PipelinePlan
from torch_xla_pp.planner.devices import Cluster, DeviceSpec, link_between_ranks
from torch_xla_pp.planner.evaluation import Cut, Evaluator, Setting
from torch_xla_pp.planner.plan_parts import plan_of
from torch_xla_pp.planner.search import SearchResult
from torch_xla_pp.planner.settings import Request
from torch_xla_pp.planner.work_costs import WorkTable
from torch_xla_pp.simulate import simulate
from torch_xla_pp.work import WorkGraph

WARM_UP_TURNS = 2
# Of `make_plan`, for what `record` runs.
OPTIONS = {"ranks": 2, "replicas": (1,), "optimizer": "sgd", "remat": ("none",)}

MakeModel = Callable[[], nn.Module]
Batch = tuple[tuple[Tensor, ...], Tensor]


def measure(
    cores: Sequence[int], make_model: MakeModel, batch: Batch, rows: Sequence[int]
) -> tuple[str, str]:
    """Return the work of a model, and what it takes on this rank, as JSON.

    Args:
        cores: One core for each rank.
        make_model: Makes the model.
        batch: A microbatch of the most rows.
        rows: The numbers of rows to measure.
    """
    import torch_xla_pp as xpp

    core = sides.join(cores)
    every = range(dist.get_world_size())
    groups = [dist.new_group([rank], backend="xla_pp") for rank in every]
    model, (args, target) = make_model(), batch
    work = xpp.trace_work(model, args)
    costs = xpp.measure_work(
        work,
        model,
        args,
        loss_fn=gpt.loss_fn,
        target=target,
        rows=rows,
        group=groups[dist.get_rank()],
    )
    check_pinned(core)
    return work.to_json(), costs.to_json()


def evaluator_of(work: WorkGraph, costs: MeasuredCosts) -> Evaluator:
    """Return what evaluates cuts by measured costs."""
    device = replace(DeviceSpec.named("cpu"), action_s=costs.action_s)
    network = link_between_ranks(device)
    cluster = Cluster(device=device, num_devices=2, network=network)
    return Evaluator(table=WorkTable(work, costs), cluster=cluster, optimizer_bytes=0.0)


def cut_into(
    stages: Sequence[int], setting: Setting, placement: tuple[int, ...] = ()
) -> Cut:
    """Return a cut into stages that compute nothing again.

    Args:
        stages: Stage of each work.
        setting: The other choices.
        placement: Rank of each stage, if the schedule is "list".
    """
    remat = ("none",) * (max(stages) + 1)
    return Cut(setting=setting, stages=tuple(stages), remat=remat, placement=placement)


def plan_of_cut(evaluator: Evaluator, cut: Cut) -> PipelinePlan:
    """Return the plan of a cut, without a search."""
    rows = cut.setting.rows * cut.setting.num_microbatches
    best = evaluator.evaluate(cut)
    return plan_of(Request(rows=rows), evaluator, best, SearchResult(), (), {})


def predicted_s(plan: PipelinePlan) -> float:
    """Return the seconds of a step that a plan predicts."""
    return simulate(plan.table(), plan.stage_costs(), plan.network()).step_s


def record(
    cores: Sequence[int],
    make_models: Sequence[MakeModel],
    make_batch: Callable[[int], Batch],
    plans: Sequence[str],
    turns: int,
) -> list[list[float]]:
    """Run plans in turns, and return the seconds of their recorded steps.

    Args:
        cores: One core for each rank.
        make_models: For each plan what makes the model.
        make_batch: Makes a batch of so many rows.
        plans: The plans as JSON.
        turns: Number of recorded steps of each.
    """
    core = sides.join(cores)
    runs = [
        _run_of(make_model(), make_batch, text)
        for make_model, text in zip(make_models, plans, strict=True)
    ]
    found: list[list[float]] = [[] for _ in runs]
    for turn in range(WARM_UP_TURNS + turns):
        for run, seconds in zip(runs, found, strict=True):
            step_s = run()
            if turn >= WARM_UP_TURNS:
                seconds.append(step_s)
    check_pinned(core)
    return found


def compared(
    model: str,
    plans: Mapping[str, PipelinePlan],
    seconds: Sequence[Sequence[float]],
    base: str,
) -> Iterator[dict[str, Any]]:
    """Yield what is measured of each plan beside what it predicts, with ratios to one.

    Args:
        model: What the model is called.
        plans: The plans by name.
        seconds: For each plan its recorded steps, in turns.
        base: The plan whose step is 1.
    """
    predicted = {name: predicted_s(plan) for name, plan in plans.items()}
    by_plan = dict(zip(plans, seconds, strict=True))
    for name, plan in plans.items():
        own = by_plan[name]
        low, _, high = quantiles(own, n=4)
        ratio = median(b / a for a, b in zip(by_plan[base], own, strict=True))
        ratio_predicted = predicted[name] / predicted[base]
        yield {
            "ranks": len(plan.ranks),
            "model": model,
            "microbatches": plan.batch.microbatches,
            "plan": name,
            "stages": " ".join(f"{s.rank}:{len(s.ops)}" for s in plan.stages),
            "schedule": plan.schedule.name,
            "measured_s": median(own),
            "quartiles_s": (low, high),
            "predicted_s": predicted[name],
            "ratio_measured": ratio,
            "ratio_predicted": ratio_predicted,
            "ratio_error": ratio_predicted / ratio - 1,
        }


def line_of(row: dict[str, Any]) -> str:
    """Return a row of `compared` as a line of text."""
    low, high = row["quartiles_s"]
    return (
        f"{row['model']} on {row['ranks']} ranks M={row['microbatches']:<2}"
        f" {row['plan']:8} {row['schedule']:11} {row['stages']:26}"
        f" measured {row['measured_s']:.4f} s ({low:.4f} to {high:.4f})"
        f"  predicted {row['predicted_s']:.4f} s"
        f"  ratio {row['ratio_measured']:.3f}, predicted {row['ratio_predicted']:.3f}"
        f" ({row['ratio_error']:+.1%})"
    )


def _run_of(
    model: nn.Module, make_batch: Callable[[int], Batch], text: str
) -> Callable[[], float]:
    """Return what runs a recorded step of a plan, and returns its seconds."""
    import torch_xla_pp as xpp

    plan = PipelinePlan.from_json(text)
    args, target = make_batch(plan.batch.rows)
    mesh = xpp.init_device_mesh("xla", plan=plan)
    pipe = xpp.pipeline(model, plan.example(args), plan=plan)
    stages = pipe.build_stages(mesh)
    schedule = pipe.make_schedule(stages, loss_fn=gpt.loss_fn)
    given = args if any(stage.is_first for stage in stages) else ()

    def run() -> float:
        with xpp.profile_step(schedule) as profile:
            schedule.step(*given, target=target, losses=[])
        return profile.timeline.step_s

    return run
