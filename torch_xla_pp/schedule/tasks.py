"""Schedules as lists of tasks, the form in which JaxPP takes them.

There a schedule is one list of tasks for each rank. A task has the attributes
`stage_id`, `mubatch_idx` and `fwd_or_bwd`; the last is a member of an enumeration,
named FWD, BWD, BWD_I or BWD_W. None is an idle slot. A tuple of tasks runs as one.

Source: "Scaling Deep Learning Training with MPMD Pipeline Parallelism" (JaxPP), 2025,
and the schedules in its repository.
"""

from typing import Any

from torch_xla_pp.schedule.action import KINDS, Action, Kind

_KIND_OF_NAME: dict[str, Kind] = {
    **{kind: kind for kind in KINDS},
    "FWD": "F",
    "BWD": "B",
    "BWD_I": "I",
    "BWD_W": "W",
}


def actions_of(task: Any) -> tuple[Action, ...]:
    """Return the actions of one slot in a list of tasks.

    Args:
        task: None, a task, or a tuple of tasks. A task is an object with JaxPP's
            attributes, or a triple (stage, microbatch, kind); a kind is a name, or
            an object that has one as `name`.

    Raises:
        ValueError: It is none of these.
    """
    if task is None:
        return ()
    if isinstance(task, tuple) and not (task and isinstance(task[0], int)):
        return tuple(action for part in task for action in actions_of(part))
    stage, microbatch, kind = _fields_of(task)
    name = getattr(kind, "name", kind)
    if name not in _KIND_OF_NAME:
        raise ValueError(
            f"task of stage {stage}, microbatch {microbatch}: expected a kind of "
            f"{', '.join(_KIND_OF_NAME)}, got {kind!r}. Name what the task runs."
        )
    return (Action(stage=stage, kind=_KIND_OF_NAME[name], microbatch=microbatch),)


def _fields_of(task: Any) -> tuple[int, int, Any]:
    if isinstance(task, tuple) and len(task) == 3:
        return task
    try:
        return task.stage_id, task.mubatch_idx, task.fwd_or_bwd
    except AttributeError:
        raise ValueError(
            "task: expected (stage, microbatch, kind), or the attributes stage_id, "
            f"mubatch_idx and fwd_or_bwd, got {task!r}. Use None for an idle slot."
        ) from None
