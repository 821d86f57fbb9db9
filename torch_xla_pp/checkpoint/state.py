"""The state of a run that is saved, and how it is restored."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from torch_xla_pp import xla_compat
from torch_xla_pp.checkpoint.catalogue import Path
from torch_xla_pp.checkpoint.contents import Contents, Wanted
from torch_xla_pp.checkpoint.device_tensor import DeviceTensor, Whole, parts_of, write
from torch_xla_pp.checkpoint.optimizers import (
    give_options,
    give_state,
    groups_of,
    merged,
    options_by_name,
)
from torch_xla_pp.checkpoint.parts import (
    Names,
    SavedStage,
    held_by,
    names_of,
    values_of,
)
from torch_xla_pp.transport import Rendezvous, XlaPpProcessGroup, of_group

_STEPS = "steps"


class State:
    """All of a run that another run needs to continue it.

    A `Stateful` of torch.distributed.checkpoint: `save` and `load` take it, and so do
    the functions of that module with our planners. All ranks of the group must make
    one, save and load together.

    It consists of parameters and persistent buffers by the names of the unsplit model,
    the state of optimizers by the names of parameters, their options, the number of
    steps and torch's random state, from which dropout follows, and `extra`.

    Args:
        stages: All stages of this rank, or the only one; None for those of `schedule`.
        optimizer: Of the stages' parameters, or several; None if there is none.
        schedule: The pipeline's schedule, or a scheduler of the learning rate, which
            has a state.
        extra: Further state: objects with `state_dict` and `load_state_dict`, such as a
            scheduler or a data loader, or values, which `load` replaces here. If
            several ranks use one key, the first rank's is saved: put the rank into the
            key of what belongs to one rank.
        process_group: All ranks of the job, replicas included; None for the default
            group.

    Raises:
        TypeError: Something is of another kind.
        ValueError: There are no stages, or a name in `extra` is within another one.

    Example:
        >>> state = State(stages=stages, optimizer=optimizer, extra={"data": loader})
        >>> save(state, "checkpoints/step-100", keep_last=3)
        >>> load(state, latest("checkpoints"))
    """

    def __init__(
        self,
        *,
        stages: SavedStage | Iterable[SavedStage] | None = None,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        schedule: Any | None = None,
        extra: dict[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.extra = {} if extra is None else extra
        _check_extra(self.extra)
        self._stages = _stages(stages, schedule)
        self._optimizers = _optimizers(optimizer)
        self._scheduler = schedule if isinstance(schedule, Stateful) else None
        self._group = of_group(process_group)

    @property
    def group(self) -> XlaPpProcessGroup:
        """Return all ranks of the job."""
        return self._group

    @property
    def rendezvous(self) -> Rendezvous:
        """Return the rendezvous of the ranks of the job."""
        return self._group.rendezvous

    def state_dict(self) -> dict[str, Any]:
        """Return what is to be saved; all ranks must call it.

        Raises:
            CheckpointError: Two stages have different things under one name.
            TypeError, ValueError: `extra` has names that it must not have.
        """
        _check_extra(self.extra)
        self._settle()
        by_id = names_of(self._stages)
        exchanged = self.rendezvous.exchange(
            "checkpoint: names",
            ([held_by(s) for s in self._stages], groups_of(self._optimizers, by_id)),
        )
        names = Names.of(part for parts, _ in exchanged for part in parts)
        groups = merged(
            _first_names(group, names) for _, own in exchanged for group in own
        )
        values: dict[str, Any] = {"model": self._own_values()}
        if self._optimizers:
            slots = self._slots(names, by_id)
            values["optim"] = {"state": slots, "param_groups": groups}
        values["progress"] = {_STEPS: self._stages[0].num_steps}
        values["rng"] = {str(self.rendezvous.rank): _random_state()}
        if self._scheduler is not None:
            values["schedule"] = _state_of(self._scheduler)
        values["extra"] = {key: _state_of(item) for key, item in self.extra.items()}
        replica, _ = self._stages[0].replica
        if replica:
            values["replicas"] = {str(replica): self._own_buffers()}
        return Contents(
            _wrapped(values), names=names, wanted=self._wanted(values, by_id)
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the run from the result of `state_dict`, into which values were read.

        Raises:
            TypeError: It was not read by `LoadPlanner`.
        """
        if not isinstance(state_dict, Contents) or state_dict.found is None:
            raise TypeError(
                "State: expected what LoadPlanner has filled, got a dict. Use "
                "torch_xla_pp.checkpoint.load, or pass planner=LoadPlanner() to "
                "torch.distributed.checkpoint.load."
            )
        found = state_dict.found
        for stage in self._stages:
            for name, value in values_of(stage).items():
                if name not in found.values:
                    continue
                saved = state_dict[found.values[name]]
                if isinstance(value, Tensor):
                    write(value, parts_of(saved))
                else:
                    path = name.rpartition(".")[0]
                    stage.submod.get_submodule(path).set_extra_state(saved)
        for name in list(found.values):
            state_dict.pop(found.values[name], None)
        if found.has_optimizer:
            self._load_optimizers(state_dict)
        self._load_extra(state_dict)

    def _settle(self) -> None:
        """Compute pending values, by the program that the next step would run."""
        tensors = [
            value
            for stage in self._stages
            for value in values_of(stage).values()
            if isinstance(value, Tensor)
        ]
        for optimizer in self._optimizers:
            tensors += [
                value
                for slots in optimizer.state.values()
                for value in slots.values()
                if isinstance(value, Tensor)
            ]
        on_devices = [value for value in tensors if value.device.type == "xla"]
        if any(xla_compat.are_pending(on_devices)):
            xla_compat.sync_all()
        xla_compat.materialize(on_devices)

    def _own_values(self) -> dict[str, Any]:
        """Return values of the model; buffers are those of the first replica."""
        found: dict[str, Any] = {}
        for stage in self._stages:
            replica, _ = stage.replica
            for name, value in values_of(stage).items():
                if isinstance(value, torch.nn.Parameter) or replica == 0:
                    is_tensor = isinstance(value, Tensor)
                    found.setdefault(name, value if is_tensor else Whole(value))
        return found

    def _own_buffers(self) -> dict[str, Any]:
        return {
            name: value
            for stage in self._stages
            for name, value in values_of(stage).items()
            if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter)
        }

    def _slots(
        self, names: Names, by_id: Mapping[int, tuple[int, str]]
    ) -> dict[str, dict[str, Any]]:
        """Return the state of optimizers, by the first name of the parameter."""
        found: dict[str, dict[str, Any]] = {}
        for optimizer in self._optimizers:
            for parameter, slots in optimizer.state.items():
                if id(parameter) not in by_id:
                    continue
                stage, name = by_id[id(parameter)]
                first = names.first_of(name)
                if names.owners[first] == stage:
                    found[first] = slots
        return found

    def _wanted(
        self, values: Mapping[str, Any], by_id: Mapping[int, tuple[int, str]]
    ) -> Wanted:
        replica, _ = self._stages[0].replica
        own = self._own_buffers() if replica else {}
        held = {name: None for stage in self._stages for name in values_of(stage)}
        trained = {
            by_id[id(parameter)][1]: None
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in by_id
        }
        extra = {f"extra.{key}": item for key, item in values["extra"].items()}
        if self._scheduler is not None:
            extra["schedule"] = values["schedule"]
        return Wanted(
            values={
                name: f"replicas.{replica}.{name}" if name in own else None
                for name in held
            },
            slots=tuple(trained) if self._optimizers else None,
            options={
                type(optimizer).__name__: frozenset(optimizer.defaults)
                for optimizer in self._optimizers
            },
            extra=tuple(key for key, item in extra.items() if item != {}),
            optional=(f"progress.{_STEPS}", f"rng.{self.rendezvous.rank}", "rng.0"),
        )

    def _load_optimizers(self, contents: Contents) -> None:
        found = contents.found
        if found is None:
            return
        by_id = names_of(self._stages)
        groups = {
            key: _nested(contents, keys, remove=False)
            for key, keys in found.options.items()
        }
        options = options_by_name(groups)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                named = [
                    (p, by_id[id(p)][1]) for p in group["params"] if id(p) in by_id
                ]
                for parameter, name in named:
                    # Copies of a tied parameter get the same.
                    slots = _nested(contents, found.slots.get(name, {}), remove=False)
                    give_state(optimizer, parameter, slots)
                firsts = [contents.first_with(name, options) for _, name in named]
                give_options(group, firsts, options)

    def _load_extra(self, contents: Contents) -> None:
        found = contents.found
        if found is None:
            return
        for key, item in self.extra.items():
            keys = found.extra.get(f"extra.{key}")
            if keys:
                self.extra[key] = _restored(item, _nested(contents, keys))
        if self._scheduler is not None and found.extra["schedule"]:
            self._scheduler.load_state_dict(_nested(contents, found.extra["schedule"]))
        steps = found.extra[f"progress.{_STEPS}"]
        if steps:
            for stage in self._stages:
                stage.num_steps = _nested(contents, steps, remove=False)
        own = found.extra[f"rng.{self.rendezvous.rank}"] or found.extra["rng.0"]
        if own:
            _set_random_state(_nested(contents, own, remove=False))


def _stages(
    stages: SavedStage | Iterable[SavedStage] | None, schedule: Any | None
) -> Sequence[SavedStage]:
    """Return the stages of this rank.

    Raises:
        ValueError: There are none.
    """
    given: Any = stages
    if given is None:
        # torch's schedules have no public name for their stages.
        given = getattr(schedule, "_stages", None) or getattr(schedule, "_stage", ())
    found: list[SavedStage] = list(given) if isinstance(given, Iterable) else [given]
    if not found:
        raise ValueError(
            "State: expected the stages of this rank, or a schedule that drives them, "
            "got neither. Pass stages."
        )
    others = [stage for stage in found if not _is_stage(stage)]
    if others:
        raise TypeError(
            f"State: expected stages, got {', '.join(map(_kind, others))}. Pass what "
            "build_stage returns, or a PipelineStage."
        )
    return found


def _is_stage(value: Any) -> bool:
    return isinstance(getattr(value, "submod", None), torch.nn.Module)


def _optimizers(value: Any) -> list[Optimizer]:
    found = [] if value is None else [value]
    if isinstance(value, Iterable) and not isinstance(value, (Optimizer, str)):
        found = list(value)
    others = [item for item in found if not isinstance(item, Optimizer)]
    if others:
        raise TypeError(
            f"State: expected optimizers, got {', '.join(map(_kind, others))}. Pass "
            "one of torch.optim, or several."
        )
    return found


def _check_extra(extra: Any) -> None:
    """Refuse anything without keys, and keys that DCP would join to equal ones."""
    if not isinstance(extra, dict) or not all(isinstance(key, str) for key in extra):
        keys = [*map(repr, extra)] if isinstance(extra, dict) else _kind(extra)
        raise TypeError(
            f"State: expected a dict by texts for extra, got {keys}. Name each thing."
        )
    inside = [
        f"{key} and {other}"
        for key in extra
        for other in extra
        if key.startswith(f"{other}.")
    ]
    if inside:
        raise ValueError(
            f"State: expected names in extra that differ before a dot, got "
            f"{'; '.join(inside)}. Rename one of them."
        )


def _kind(value: Any) -> str:
    return type(value).__name__


def _first_names(group: Mapping[str, Any], names: Names) -> dict[str, Any]:
    return {**group, "params": [names.first_of(name) for name in group["params"]]}


def _wrapped(value: Any) -> Any:
    """Wrap the tensors of nested dicts as `DeviceTensor`, for planners."""
    if isinstance(value, Tensor):
        return DeviceTensor(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            return Whole(value)
        return {key: _wrapped(item) for key, item in value.items()}
    return value


def _state_of(value: Any) -> Any:
    return value.state_dict() if isinstance(value, Stateful) else value


def _restored(value: Any, saved: Any) -> Any:
    """Restore `value` from what was saved of it, and return what replaces it."""
    if isinstance(value, Stateful):
        value.load_state_dict(saved)
        return value
    if isinstance(value, Tensor) and isinstance(saved, Tensor):
        write(value, parts_of(saved))
        return value
    return saved


def _random_state() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "xla": xm.get_rng_state()}


def _set_random_state(saved: Mapping[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    xm.set_rng_state(saved["xla"])


def _nested(
    contents: Contents, keys: Mapping[Path, str], *, remove: bool = True
) -> Any:
    """Return what was read under some keys, nested as it was saved."""
    root: dict[str, Any] = {}
    for path, key in keys.items():
        value = contents.pop(key) if remove else contents[key]
        _set(root, ("", *path), value)
    return root.get("", {})


def _set(container: Any, path: Path, value: Any) -> None:
    """Put a value into nested dicts and lists; makes those that are missing."""
    for key, following in zip(path, path[1:], strict=False):
        if _at(container, key) is None:
            container[key] = [] if isinstance(following, int) else {}
        container = container[key]
    _at(container, path[-1])
    container[path[-1]] = value


def _at(container: Any, key: str | int) -> Any:
    """Return an item, None if there is none; a list is extended up to it."""
    if isinstance(container, dict):
        return container.get(key)
    container += [None] * (int(key) + 1 - len(container))
    return container[int(key)]
