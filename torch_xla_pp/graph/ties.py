"""Checks on a model and its split points, before and after the split."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torch_xla_pp.deferred import (
    PARAMETER,
    TensorPlace,
    places_of,
    record_of,
    share_record,
)
from torch_xla_pp.graph.stage_graph import SharedParameter

_CALL_NUMBER = re.compile(r"@\d+")


def check_split_spec(module: nn.Module, split_spec: Mapping[str, Any]) -> None:
    """Refuse split points that name no submodule of `module`.

    Raises:
        ValueError: There are such; they are named, with the submodules that exist.
    """
    known = [name for name, _ in module.named_modules() if name]
    unknown = [name for name in split_spec if name not in known]
    if unknown:
        raise ValueError(
            f"split_spec: expected names of submodules of {type(module).__name__}, "
            f"got unknown {unknown}. Use names out of: {', '.join(known)}."
        )


def shared_parameters(
    groups: Iterable[tuple[str, ...]], stages: Sequence[nn.Module]
) -> tuple[SharedParameter, ...]:
    """Return the parameters that more than one stage holds a copy of.

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

    Tracing keeps only one of the names, and it is not certain which one. Parameters
    that are shared because a whole submodule is are left as they are.
    """
    places = {place.name: place for place in places_of(module)}
    replaced = []
    for group in groups:
        first, *others = (places[name] for name in group)
        for place in others:
            if place.slots is not first.slots and place.tensor is first.tensor:
                replaced.append((place, place.tensor))
                place.put(_copy_of(place.tensor))
    try:
        yield
    finally:
        for place, parameter in replaced:
            place.put(parameter)


def _copy_of(parameter: Tensor) -> nn.Parameter:
    data = parameter.detach().clone()
    record = record_of(parameter)
    if record is not None:
        share_record(record, data)
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def tie_parameters(groups: Iterable[tuple[str, ...]], stage: nn.Module) -> None:
    """Merge the copies that tracing has made of one parameter.

    Each name of a shared parameter has a copy of its own, and so has each call of a
    submodule that is called several times: calls after the first are submodules of
    their own, called `name@1` and so on. The first name's parameter is kept.
    """
    group_of = {name: group[0] for group in groups for name in group}
    number = {name: i for group in groups for i, name in enumerate(group)}
    first: dict[str, Tensor] = {}

    def order(place: TensorPlace) -> int:
        return number.get(original_name(place.name), 0)

    _list_calls_last(stage)
    for place in sorted(_parameters_of(stage), key=order):
        plain = original_name(place.name)
        place.put(first.setdefault(group_of.get(plain, plain), place.tensor))


def keep_parameters(module: nn.Module, stage: nn.Module) -> None:
    """Give a stage the parameters of the model itself, not those of its trace.

    An optimizer of the model's parameters then trains the stage's.
    """
    known = {place.name: place.tensor for place in _parameters_of(module)}
    for place in _parameters_of(stage):
        plain = original_name(place.name)
        if plain in known:
            place.put(known[plain])


def _parameters_of(module: nn.Module) -> list[TensorPlace]:
    return [place for place in places_of(module) if place.holding == PARAMETER]


def keep_persistence(module: nn.Module, stage: nn.Module) -> None:
    """Leave out of a stage's state dict the buffers that the model's does not have."""
    known = set(module.state_dict(keep_vars=True))
    for path, part in stage.named_modules():
        for key in part._buffers:
            if original_name(f"{path}.{key}" if path else key) not in known:
                part._non_persistent_buffers_set.add(key)


def original_name(name: str) -> str:
    """Return the name in the model of a traced stage's `name`."""
    return _CALL_NUMBER.sub("", name)


def _list_calls_last(stage: nn.Module) -> None:
    """Order submodules before their repeated calls, to name parameters by them."""
    for module in stage.modules():
        for name in [name for name in module._modules if "@" in name]:
            module._modules[name] = module._modules.pop(name)
