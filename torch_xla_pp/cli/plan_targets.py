"""What a plan is made for: work in a file, or a model that a script makes."""

import runpy
from pathlib import Path
from typing import Any

from torch_xla_pp.planner import MeasuredCosts
from torch_xla_pp.work import WorkGraph


def work_and_costs(
    target: str, costs: str | None, measure: str | None
) -> tuple[WorkGraph, MeasuredCosts | None]:
    """Return the work of a model, and what it was measured to take, if that is asked.

    Args:
        target: A file of `WorkGraph.to_json`, or `script.py:function`.
        costs: A file of `MeasuredCosts.to_json`, None for none.
        measure: A file to write after the works have run here, None not to run them.

    Raises:
        ValueError: The target is neither, or cannot be measured.
    """
    if costs is not None and measure is not None:
        raise ValueError(
            "plan: expected --costs or --measure, got both. Leave one out: --measure "
            "writes what --costs reads."
        )
    known = None if costs is None else MeasuredCosts.from_json(Path(costs))
    script, _, name = target.rpartition(":")
    if script.endswith(".py"):
        made = _made(target, script, name)
        work = _traced(made)
        return work, known if measure is None else _measured(work, made, measure)
    if measure is not None:
        raise ValueError(
            f"plan --measure: expected script.py:function, got {target}. A file of "
            "works has no model to run."
        )
    return WorkGraph.from_json(Path(target)), known


def _made(target: str, script: str, name: str) -> tuple[Any, ...]:
    """Return what a script's function returns."""
    known = runpy.run_path(script)
    made = known[name]() if callable(known.get(name)) else None
    if (
        not isinstance(made, tuple)
        or len(made) not in (2, 4)
        or not isinstance(made[1], tuple)
    ):
        raise ValueError(
            f"{target}: expected a function that returns a model, the tuple of a "
            "microbatch's arguments, and a loss function with its target or neither, "
            f"got {type(made).__name__}. Write e.g. def plan(): return Model(), "
            "(torch.zeros(8, 128),), mse_loss, torch.zeros(8, 2)."
        )
    return made


def _traced(made: tuple[Any, ...]) -> WorkGraph:
    from torch_xla_pp.tracing import trace_work  # With torch, which files do without.

    loss_fn, target = (*made[2:], None, None)[:2]
    return trace_work(made[0], made[1], loss_fn=loss_fn, target=target)


def _measured(work: WorkGraph, made: tuple[Any, ...], path: str) -> MeasuredCosts:
    """Run the works in a job of this process alone, and write what they take."""
    if len(made) == 2:
        raise ValueError(
            "plan --measure: expected a function that returns a loss function and its "
            "target, too, as a backward begins with them, got neither. Return all four."
        )
    import torch.distributed as dist

    from torch_xla_pp.local_job import free_port
    from torch_xla_pp.measuring import measure_work

    model, args, loss_fn, target = made
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("xla_pp", address, rank=0, world_size=1)
    try:
        costs = measure_work(work, model, args, loss_fn=loss_fn, target=target)
    finally:
        dist.destroy_process_group()
    costs.to_json(path)
    return costs
