"""Measure the times of a model's parts on this machine, for a planner.

Every work of the model runs as a stage of its own, all of them on this rank. A stage of
many works takes less than these add up to, as operations of several works become one.
So the model runs as a few stages, too, and the times of their works are scaled to them.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_xla_pp.env import device_kind
from torch_xla_pp.graph import GivenStages
from torch_xla_pp.launch import device
from torch_xla_pp.mesh import LogicalAxes
from torch_xla_pp.pipe import split_as
from torch_xla_pp.planner import MeasuredCosts, RowSeconds, WorkSeconds
from torch_xla_pp.profile import profile_step
from torch_xla_pp.runtime import PipelineStage, ScheduleFromTable
from torch_xla_pp.schedule import Action, Kind, Schedule
from torch_xla_pp.simulate import (
    ActionSeconds,
    even_stages,
    measured_costs,
    scaled_seconds,
)
from torch_xla_pp.work import WorkGraph

_MICROBATCHES = 2
_WARM_UP_STEPS = 2
_NUM_STAGES = 4


def measure_work(
    work: WorkGraph,
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any, Any], Any],
    target: Any,
    rows: Sequence[int] | None = None,
    activations: Mapping[str, LogicalAxes] | None = None,
    steps: int = 7,
    group: dist.ProcessGroup | None = None,
) -> MeasuredCosts:
    """Run each part of a model on this rank's device, and return the times.

    Called with one device, by a process alone; or by each of several at once in a group
    of its own, so that times are those of a machine that is as busy. It compiles all
    works for each number of rows, which takes a second or two each; `module` is
    left as it is.

    Args:
        work: The result of `trace_work` for the model and this example.
        module: The model, with values; it is copied.
        mb_args: Positional arguments of a microbatch with the most rows to measure.
        mb_kwargs: Its keyword arguments.
        loss_fn: Computes the loss from output and target.
        target: The target of the microbatch.
        rows: Rows to measure; a half and all of the example's if not given. Times hold
            for up to four times fewer or more.
        activations: As for `trace_work`.
        steps: Number of measured steps; the median counts.
        group: A group of this process alone; None for the default group.

    Raises:
        ValueError: There are several ranks, or the example has too few rows.
    """
    if dist.get_world_size(group) > 1:
        raise ValueError(
            f"measure_work: expected one process, got {dist.get_world_size(group)}. "
            "Run it before the job, or pass a group of this rank alone."
        )
    counts = _counts(rows, (mb_args, mb_kwargs))

    def run(stages: Sequence[int], count: int) -> ActionSeconds:
        homes = zip(work.works, stages, strict=True)
        given = GivenStages(
            names=tuple(f"stage_{n}" for n in range(1 + max(stages))),
            stages={op: stage for item, stage in homes for op in item.ops},
        )
        args, kwargs, labels = _first((mb_args, mb_kwargs, target), count)
        pipe = split_as(
            copy.deepcopy(module), args, kwargs, given, activations=activations
        )
        built = [pipe.build_stage(n, device(), group) for n in range(pipe.num_stages)]
        return _seconds(built, (args, kwargs or {}, labels), loss_fn, steps)

    apart = [run(range(len(work.works)), count) for count in counts]
    stages = even_stages(apart[-1], len(work.works), _NUM_STAGES)
    together = [run(stages, count) for count in counts]
    # The smallest work computes next to nothing.
    action_s = min(
        s for found in apart for (_, kind), s in found.items() if kind == "F"
    )
    pairs = zip(apart, together, strict=True)
    scaled = [scaled_seconds(*pair, stages, action_s) for pair in pairs]
    return MeasuredCosts(
        device=device_kind().lower(),
        rows=tuple(counts),
        action_s=action_s,
        works=_works(work, counts, scaled),
    )


def _counts(rows: Sequence[int] | None, example: Any) -> list[int]:
    """Return the numbers of rows to measure, which the example must have."""
    tensors = [x for x in pytree.tree_leaves(example) if isinstance(x, Tensor)]
    most = next((x.shape[0] for x in tensors if x.dim()), 0)
    counts = sorted({max(1, most // 2), most} if rows is None else set(rows))
    if not counts or counts[0] < 1 or counts[-1] > most:
        raise ValueError(
            f"measure_work: expected numbers of rows from 1 to {most}, as the example "
            f"has so many, got {counts}. Pass an example with more rows."
        )
    return counts


def _first(example: Any, count: int) -> Any:
    """Return the first rows of all tensors."""

    def cut(value: Any) -> Any:
        return value[:count] if isinstance(value, Tensor) and value.dim() else value

    return pytree.tree_map(cut, example)


def _seconds(
    stages: Sequence[PipelineStage],
    example: tuple[tuple[Any, ...], dict[str, Any], Any],
    loss_fn: Callable[[Any, Any], Any],
    steps: int,
) -> ActionSeconds:
    """Run steps of all stages, and return the time of each kind of action."""
    found: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    args, kwargs, target = pytree.tree_map(_repeated, example)
    kinds: tuple[tuple[Kind, ...], ...] = (("F", "B"), ("F", "I", "W"))
    # One stage alone has no gradients of inputs, so I and W are not apart.
    for order in kinds[: min(2, len(stages))]:
        table = _table(len(stages), order)
        schedule = ScheduleFromTable(list(stages), table, loss_fn)
        for step in range(_WARM_UP_STEPS + steps):
            with profile_step(schedule) as profile:
                schedule.step(*args, target=target, losses=[], **kwargs)
            if step < _WARM_UP_STEPS:
                continue
            for action, seconds in measured_costs([profile.timeline]).seconds.items():
                found[action].append(seconds)
    if len(stages) == 1:
        found[0, "I"], found[0, "W"] = [0.0], found[0, "B"]
    return {action: median(seconds) for action, seconds in found.items()}


def _repeated(value: Any) -> Any:
    """Return a batch of equal microbatches."""
    if isinstance(value, Tensor) and value.dim():
        return value.repeat(_MICROBATCHES, *[1] * (value.dim() - 1))
    return value


def _table(num_stages: int, order: Sequence[Kind]) -> Schedule:
    """Return the order of one rank with all stages: one microbatch after the other."""
    stages = range(num_stages)
    row = [
        Action(stage=stage, kind=kind, microbatch=microbatch)
        for microbatch in range(_MICROBATCHES)
        for kind in order
        for stage in (stages if kind == "F" else reversed(stages))
    ]
    return Schedule(actions=(tuple(row),))


def _works(
    work: WorkGraph, rows: Sequence[int], seconds: Sequence[ActionSeconds]
) -> tuple[WorkSeconds, ...]:
    """Return the times of each kind of work; equal works are taken together."""
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for number, item in enumerate(work.works):
        alike[item.digest].append(number)

    def line(numbers: Sequence[int], kind: Kind) -> RowSeconds:
        means = [fmean(found[n, kind] for n in numbers) for found in seconds]
        return RowSeconds.fitted(rows, means)

    return tuple(
        WorkSeconds(
            digest=digest,
            name=work.works[numbers[0]].name,
            forward=line(numbers, "F"),
            backward=line(numbers, "B"),
            backward_input=line(numbers, "I"),
            backward_weight=line(numbers, "W"),
        )
        for digest, numbers in alike.items()
    )
