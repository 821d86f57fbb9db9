"""What a stage refuses before it does anything, and what it tells the others of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torch_xla_pp.mesh import AxisRules, unmatched
from torch_xla_pp.runtime.module_state import shapes_of
from torch_xla_pp.runtime.plan import StagePlan
from torch_xla_pp.runtime.planning import names_of_stages


def check_kwargs(kwargs: Mapping[str, Any], plans: Sequence[StagePlan]) -> None:
    """Refuse keyword arguments that no stage of the rank takes."""
    unknown = [name for name in kwargs if not any(plan.takes(name) for plan in plans)]
    if unknown:
        stages = names_of_stages([plan.stage for plan in plans])
        raise ValueError(
            f"step: expected keyword arguments that {stages} of this rank takes, got "
            f"{', '.join(unknown)}. Pass them on the rank of the stage that takes them."
        )


def matched_patterns(
    rules: AxisRules | None,
    module: nn.Module,
    whole_model: Mapping[str, tuple[int, ...]] | None,
) -> dict[str, bool]:
    """Return which patterns match something, of those to be checked by all ranks."""
    if rules is None or whole_model is not None:
        return {}
    modules = [name for name, _ in module.named_modules() if name]
    found: dict[str, bool] = {}
    for table, names in (("parameters", shapes_of(module)), ("activations", modules)):
        patterns = getattr(rules, table)
        missing = unmatched(patterns, names)
        found |= {f"{p!r} of {table}": p not in missing for p in patterns}
    return found


def check_index(stage_index: int, num_stages: int) -> None:
    """Refuse a stage that the pipeline does not have."""
    if not 0 <= stage_index < num_stages:
        raise ValueError(
            f"stage_index: expected one of 0..{num_stages - 1}, got {stage_index}. "
            "Use e.g. the rank in the pipeline's group."
        )


def check_device(device: torch.device) -> None:
    """Refuse other devices than XLA's."""
    if torch.device(device).type != "xla":
        raise ValueError(
            f"device: expected the XLA device, got {device}. Pass xpp.device()."
        )
