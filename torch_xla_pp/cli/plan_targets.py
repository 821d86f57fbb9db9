"""The target of a plan: work in a file, or a model that a script makes."""

import runpy
from pathlib import Path
from typing import Any

from torch_xla_pp import env
from torch_xla_pp.planner import MeasuredCosts
from torch_xla_pp.work import WorkGraph

_COMPILED = "aot:"


def work_and_costs(
    target: str, costs: str | None, measure: str | None, device: str
) -> tuple[WorkGraph, MeasuredCosts | None]:
    """Return the work of a model, and its measured costs, if options ask for them.

    Args:
        target: A file of `WorkGraph.to_json`, or `script.py:function`.
        costs: A file of `MeasuredCosts.to_json`, None for none; after "aot:" one of
            compiled works, which is written if it is not there.
        measure: A file to write after the works have run here, None not to run them.
        device: What works are compiled for.

    Raises:
        ValueError: The target is neither, or cannot be measured.
    """
    if costs is not None and measure is not None:
        raise ValueError(
            "plan: expected --costs or --measure, got both. Leave one out: --measure "
            "writes what --costs reads."
        )
    script, _, _ = target.rpartition(":")
    is_compiled, path = (costs or "").startswith(_COMPILED), (costs or "")
    path = path.removeprefix(_COMPILED)
    if is_compiled and not Path(path).is_file() and script.endswith(".py"):
        return _compiled(target, path, device)
    known = None if costs is None else _read(Path(path), is_compiled=is_compiled)
    if script.endswith(".py"):
        made = made_by(target)
        work = _traced(made)
        return work, known if measure is None else _measured(work, made, measure)
    if measure is not None:
        raise ValueError(
            f"plan --measure: expected script.py:function, got {target}. A file of "
            "works has no model to run."
        )
    return WorkGraph.from_json(Path(target)), known


def _read(path: Path, *, is_compiled: bool) -> MeasuredCosts:
    """Read costs, which must be of the kind that was asked for."""
    if is_compiled and not path.is_file():
        raise ValueError(
            f"plan --costs: expected a file of compiled works, got none at {path}. "
            "Plan script.py:function, whose works can be compiled, to write it."
        )
    found = MeasuredCosts.from_json(path)
    if bool(found.compiler) != is_compiled:
        wanted = f"{_COMPILED}{path}" if found.compiler else f"{path}"
        raise ValueError(
            f"plan --costs: expected {'compiled' if is_compiled else 'measured'} costs "
            f"in {path}, got some that are {found}. Write --costs {wanted}."
        )
    return found


def _compiled(target: str, path: str, device: str) -> tuple[WorkGraph, MeasuredCosts]:
    """Compile the works of a script's model for a device that need not be here."""
    from torch_xla_pp.accelerators import CHIPS, CompilerLibrary

    if device not in CHIPS:
        raise ValueError(
            f"plan --costs {_COMPILED}{path}: expected --device of {', '.join(CHIPS)}, "
            f"got {device}. Name what to compile for."
        )
    CompilerLibrary.find()
    env.stand_in_for(1)
    from torch_xla_pp.fitting import compile_work  # Imports torch.

    made = made_by(target)
    work = _traced(made)
    loss_fn, labels = (*made[2:], None, None)[:2]
    costs = compile_work(
        work, made[0], made[1], chip=device, loss_fn=loss_fn, target=labels
    )
    costs.to_json(path)
    return work, costs


def made_by(target: str) -> tuple[Any, ...]:
    """Return what a script's function returns, given as `script.py:function`.

    Returns:
        A model, its arguments and, if there is one, a loss function and its target.

    Raises:
        ValueError: It returns something else.
    """
    script, _, name = target.rpartition(":")
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
    from torch_xla_pp.tracing import trace_work  # Imports torch.

    loss_fn, target = (*made[2:], None, None)[:2]
    return trace_work(made[0], made[1], loss_fn=loss_fn, target=target)


def _measured(work: WorkGraph, made: tuple[Any, ...], path: str) -> MeasuredCosts:
    """Run the works in a job of this process alone, and write their times."""
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
