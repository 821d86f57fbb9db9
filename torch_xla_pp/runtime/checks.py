"""What a stage refuses before it does anything, and what it tells the others of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_xla_pp import xla_compat
from torch_xla_pp.deferred import shapes_of
from torch_xla_pp.mesh import AxisRules, unmatched
from torch_xla_pp.runtime.plan import StagePlan
from torch_xla_pp.runtime.planning import names_of_stages


def check_plain_module(what: str, module: nn.Module) -> None:
    """Refuse a module that averages gradients by itself, which a stage never calls."""
    if isinstance(module, DistributedDataParallel):
        raise TypeError(
            f"{what}: expected the model itself, got DistributedDataParallel. Pass "
            "model.module; replicas of the pipeline average their gradients if its "
            'stages are built with replicas=mesh.get_group("dp").'
        )


def check_batch(batch: Sequence[Any]) -> None:
    """Refuse tensors that are wrapped: a schedule cannot cut them."""
    if any(isinstance(x, Tensor) and xla_compat.is_wrapped(x) for x in batch):
        raise TypeError(
            "step: expected plain tensors as batch and target, got XLAShardedTensor. "
            "mark_sharding and distribute_tensor shard the tensor that they are given: "
            "pass what they return as x.global_tensor, or leave the batch on the host, "
            "which is laid out by the stage's mesh."
        )


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
