"""State of optimizers by the names of parameters.

What is written is what `torch.distributed.checkpoint.state_dict` makes of one optimizer
of the whole model: parameters that have the same options are a group, whichever rank's
optimizer has them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_xla_pp.checkpoint.device_tensor import uploaded
from torch_xla_pp.errors import CheckpointError

Groups = list[dict[str, Any]]
ByName = Mapping[int, tuple[int, str]]


def groups_of(optimizers: Iterable[Optimizer], names: ByName) -> Groups:
    """Return groups of options with the names of their parameters.

    Args:
        optimizers: Those of this rank. Parameters of other ranks are left out.
        names: Id of a parameter → its stage and name.
    """
    return [
        {**options_of(group), "params": [names[id(p)][1] for p in own]}
        for optimizer in optimizers
        for group in optimizer.param_groups
        if (own := [p for p in group["params"] if id(p) in names])
    ]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group, which has parameters, too; tensors on the host."""
    return {
        key: value.detach().cpu() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def merged(groups: Iterable[Mapping[str, Any]]) -> Groups:
    """Make one group of those with equal options."""
    found: Groups = []
    for group in groups:
        options = options_of(group)
        like = next((g for g in found if _are_equal(options_of(g), options)), None)
        if like is None:
            like = {**options, "params": []}
            found.append(like)
        like["params"] += [
            name for name in group["params"] if name not in like["params"]
        ]
    return found


def _are_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key])
        if isinstance(value, Tensor) and isinstance(other[key], Tensor)
        else type(value) is type(other[key]) and value == other[key]
        for key, value in one.items()
    )


def give_state(
    optimizer: Optimizer, parameter: Tensor, slots: Mapping[str, Any]
) -> None:
    """Replace an optimizer's state for a parameter by `slots`.

    Tensors of the parameter's shape are sharded as it is. Numbers stay on the host
    where an optimizer counts there.
    """
    group = next(
        g for g in optimizer.param_groups if any(p is parameter for p in g["params"])
    )
    counts_there = bool(group.get("capturable") or group.get("fused"))

    def placed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: placed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [placed(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        is_count = value.dim() == 0 and not counts_there
        # An object of its own for each copy of a tied parameter: it is incremented.
        on_host = parameter.device.type != "xla" or is_count
        return value.clone() if on_host else uploaded(value, parameter)

    if slots:
        optimizer.state[parameter] = {
            key: placed(value) for key, value in slots.items()
        }
    else:
        optimizer.state.pop(parameter, None)


def give_options(
    group: dict[str, Any], names: Sequence[str], saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Restore the options of an optimizer's group from those of its parameters.

    Args:
        group: Changed in place.
        names: The first names of its parameters.
        saved: Name → options.

    Raises:
        CheckpointError: The options of the parameters differ.
    """
    found = [saved[name] for name in names if name in saved]
    unlike = [
        name
        for name in names
        if name in saved and not _are_equal(saved[name], found[0])
    ]
    if unlike:
        raise CheckpointError(
            f"optimizer: expected equal options for the parameters of a group, got "
            f"others for {', '.join(unlike)} than for {names[0]} in the checkpoint. "
            "Make groups as they were when it was saved."
        )
    for key, value in (found[0] if found else {}).items():
        known = group.get(key)
        if isinstance(known, Tensor) and isinstance(value, Tensor):
            known.copy_(value)
        else:
            group[key] = value


def options_by_name(
    groups: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Return name → options, of groups as `Catalogue.options` has them."""
    found: dict[str, dict[str, Any]] = {}
    for key, group in groups.items():
        for name in group.get("params", [key]):
            found[str(name)] = options_of(group)
    return found
