"""Checks on a model and its split points, before and after the split."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from torch_xla_pp.graph.record import record_of, share_record
from torch_xla_pp.graph.stage_graph import SharedParameter

_CALL_NUMBER = re.compile(r"@\d+")


def check_split_spec(module: nn.Module, split_spec: Mapping[str, Any]) -> None:
    """Refuse split points that name no submodule of `module`.

    Raises:
        ValueError: Names every unknown submodule and those that exist.
    """
    known = [name for name, _ in module.named_modules() if name]
    unknown = [name for name in split_spec if name not in known]
    if unknown:
        raise ValueError(
            f"split_spec: expected names of submodules of {type(module).__name__}, "
            f"got unknown {unknown}. Use names out of: {', '.join(known)}."
        )


def parameter_names(module: nn.Module) -> list[tuple[str, ...]]:
    """Return for each parameter of `module` all names that it has."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(group) for group in names.values()]


def shared_parameters(
    groups: Iterable[tuple[str, ...]], stages: Sequence[nn.Module]
) -> tuple[SharedParameter, ...]:
    """Return the parameters of which more than one stage holds a copy.

    Args:
        groups: The names of each parameter of the whole model.
        stages: The stages that it was split into, each with one parameter per group.
    """
    held = [dict(stage.named_parameters()) for stage in stages]
    shared = []
    for group in groups:
        names = [
            (index, name)
            for index, parameters in enumerate(held)
            for name in group
            if name in parameters
        ]
        if len(names) > 1:
            shared.append(SharedParameter(group=group[0], names=tuple(names)))
    return tuple(shared)


@contextlib.contextmanager
def untied(module: nn.Module, groups: Iterable[tuple[str, ...]]) -> Iterator[None]:
    """Give each name of a shared parameter a parameter of its own, for tracing.

    Tracing keeps one of the names only, and which one is not sure. Parameters that
    are shared because a whole submodule is are left as they are.
    """
    replaced = []
    for group in groups:
        slots = [_slot(module, name) for name in group]
        for slot, key in slots[1:]:
            if slot is not slots[0][0] and slot[key] is slots[0][0][slots[0][1]]:
                replaced.append((slot, key, slot[key]))
                slot[key] = _copy_of(slot[key])
    try:
        yield
    finally:
        for slot, key, parameter in replaced:
            slot[key] = parameter


def _slot(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, key = name.rpartition(".")
    return module.get_submodule(path)._parameters, key


def _copy_of(parameter: nn.Parameter) -> nn.Parameter:
    data = parameter.detach().clone()
    record = record_of(parameter)
    if record is not None:
        share_record(record, data)
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def tie_parameters(groups: Iterable[tuple[str, ...]], stage: nn.Module) -> None:
    """Make one parameter again of those that tracing has copied.

    Each name of a shared parameter has a copy of its own, and so has each call of a
    submodule that is called several times: calls after the first are submodules of
    their own, called `name@1` and so on. The first name's parameter is kept.
    """
    group_of = {name: group[0] for group in groups for name in group}
    place = {name: i for group in groups for i, name in enumerate(group)}
    first: dict[str, nn.Parameter] = {}
    _list_calls_last(stage)
    held = [
        (original_name(name), name, parameter)
        for name, parameter in stage.named_parameters(remove_duplicate=False)
    ]
    for plain, name, parameter in sorted(held, key=lambda item: place.get(item[0], 0)):
        slot, key = _slot(stage, name)
        slot[key] = first.setdefault(group_of.get(plain, plain), parameter)


def keep_parameters(module: nn.Module, stage: nn.Module) -> None:
    """Let a stage have the parameters of the model themselves, not those of its trace.

    An optimizer of the model's parameters then trains the stage's.
    """
    known = dict(module.named_parameters(remove_duplicate=False))
    for name, _ in list(stage.named_parameters(remove_duplicate=False)):
        plain = original_name(name)
        if plain in known:
            slot, key = _slot(stage, name)
            slot[key] = known[plain]


def keep_persistence(module: nn.Module, stage: nn.Module) -> None:
    """Let a stage's state dict have no buffer that the model's has not."""
    known = set(module.state_dict(keep_vars=True))
    for path, part in stage.named_modules():
        for key in part._buffers:
            if original_name(f"{path}.{key}" if path else key) not in known:
                part._non_persistent_buffers_set.add(key)


def original_name(name: str) -> str:
    """Return the name in the model of what a traced stage has under `name`."""
    return _CALL_NUMBER.sub("", name)


def _list_calls_last(stage: nn.Module) -> None:
    """Let submodules come before their repeated calls, to give parameters names."""
    for module in stage.modules():
        for name in [name for name in module._modules if "@" in name]:
            module._modules[name] = module._modules.pop(name)
