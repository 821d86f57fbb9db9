"""The arguments that a stage refuses before it does anything."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import name_in_module
from torch_xla_pp.deferred import shapes_of
from torch_xla_pp.errors import PipelineError, StageShapeError
from torch_xla_pp.mesh import AxisRules, unmatched


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


def check_rows(batch: Sequence[Any], num_microbatches: int) -> None:
    """Refuse the remainder of a loader's data, before it is cut.

    Args:
        batch: The leaves of arguments and target, tensors with rows in dimension 0.
        num_microbatches: The number of equal parts to cut the rows into.

    Raises:
        StageShapeError: They cannot be cut so.
    """
    counts = {x.shape[0] for x in batch if isinstance(x, Tensor) and x.dim()}
    uneven = sorted(count for count in counts if count % num_microbatches or not count)
    if uneven:
        raise StageShapeError(
            f"step: expected a batch of rows that divide into {num_microbatches} equal "
            f"microbatches, got {', '.join(map(str, uneven))} rows. Fill up a short "
            "one on all ranks, x, y = xpp.pad_batch(schedule, x, y, rows=...), or "
            "leave it out, DataLoader(..., drop_last=True)."
        )


def check_no_hooks(stage: int, values: Mapping[str, Tensor]) -> None:
    """Refuse hooks of parameters, which autograd calls and programs do not.

    Args:
        stage: Index of the stage.
        values: Its parameters and buffers, by role.

    Raises:
        PipelineError: Some have hooks; all of them are named.
    """
    hooked = [
        name_in_module(role)
        for role, value in values.items()
        if value._backward_hooks or value._post_accumulate_grad_hooks
    ]
    if hooked:
        raise PipelineError(
            f"stage {stage}: expected parameters without hooks, got register_hook or "
            f"register_post_accumulate_grad_hook of {', '.join(hooked)}. Gradients are "
            "summed up by compiled programs: change parameter.grad after the step."
        )


def matched_patterns(
    rules: AxisRules | None,
    module: nn.Module,
    whole_model: Mapping[str, tuple[int, ...]] | None,
) -> dict[str, bool]:
    """Return whether each pattern matches here, for those that all ranks check."""
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
    """Refuse the index of a stage that the pipeline does not have."""
    if not 0 <= stage_index < num_stages:
        raise ValueError(
            f"stage_index: expected one of 0..{num_stages - 1}, got {stage_index}. "
            "Use e.g. the rank in the pipeline's group."
        )


def check_device(device: torch.device) -> None:
    """Refuse other devices than XLA's."""
    if str(device).partition(":")[0] != "xla":
        raise ValueError(
            f"device: expected the XLA device, got {device}. Pass xpp.device()."
        )


def free_parameters(
    module: nn.Module, num_args: int, kwargs: Sequence[str]
) -> frozenset[str] | None:
    """Return the parameters of a module's forward that no other stage fills.

    Args:
        module: The module of a stage.
        num_args: How many positional arguments come from other stages.
        kwargs: Names of the keyword arguments that come from them.

    Returns:
        Their names, None if the module takes any.
    """
    parameters = list(inspect.signature(module.forward).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters[num_args:]) - set(kwargs)


def example_tensors(
    name: str, values: Tensor | tuple[Tensor, ...] | None
) -> tuple[Tensor, ...] | None:
    """Return the examples of an argument as a tuple; refuse what is not a tensor."""
    if values is None or isinstance(values, Tensor):
        return None if values is None else (values,)
    if isinstance(values, (tuple, list)) and all(isinstance(x, Tensor) for x in values):
        return tuple(values)
    kind = type(values).__name__
    raise TypeError(
        f"{name}: expected a tensor or a tuple of tensors, got {kind}. "
        "Pass arguments behind the device by name, e.g. group=group."
    )
