"""Checks on a model and its split points, before and after the split."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn


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


def shared_parameters(stages: Iterable[nn.Module]) -> list[str]:
    """List the parameters that more than one stage uses, with their stages."""
    users: dict[int, list[str]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            users.setdefault(id(parameter), []).append(f"{name} (stage {index})")
    return [" = ".join(names) for names in users.values() if len(names) > 1]
