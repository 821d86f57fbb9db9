"""Compute the values of modules on meta, or report which have none."""

from collections.abc import Callable

from torch import Tensor, nn

from torch_xla_pp.deferred.deferred_init import deferred_init
from torch_xla_pp.deferred.module_tensors import (
    TensorPlace,
    all_places_of,
    state_of,
)
from torch_xla_pp.deferred.naming import is_deferred, name_values
from torch_xla_pp.deferred.recipes import record_of, value_of
from torch_xla_pp.errors import PipelineError


def materialize(module: nn.Module) -> nn.Module:
    """Compute the values of all parameters and buffers on meta, on the host.

    Stages do so themselves. This is for the whole model in one process, for comparison:
    the values are those that the stages of any pipeline get.

    Args:
        module: Built under `deferred_init`, or on meta from modules with a
            `reset_parameters`. Changed in place; a tensor with several names stays one.

    Returns:
        The module.

    Raises:
        PipelineError: Some have no value; all of them are named.

    Example:
        >>> with deferred_init():
        ...     model = Model()
        >>> optimizer = torch.optim.AdamW(materialize(model).parameters())
    """
    record_resets(module)
    missing = unwritten(module)
    if missing:
        raise PipelineError(f"materialize: {lacking(missing)}.")
    replace_tensors(module, _made)
    return module


def record_resets(module: nn.Module) -> None:
    """Let modules that were built on meta initialize themselves, later.

    These are the modules with a `reset_parameters` none of whose parameters was ever
    written to. Tensors without a name get one.

    Raises:
        PipelineError: A tensor that was built under `deferred_init` was written to
            outside of it.
    """
    _check_versions(module)
    with deferred_init():
        for sub in module.modules():
            reset = getattr(sub, "reset_parameters", None)
            own = [value for value in sub._parameters.values() if value is not None]
            if callable(reset) and own and not is_deferred(sub):
                if not any(_has_value(value) for value in own):
                    reset()
    name_values(module)


def unwritten(module: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that have no value and no recipe."""
    held = state_of(module)
    return [place.name for place in held if not _has_value(place.tensor)]


def lacking(names: list[str]) -> str:
    """Write what to do about tensors without a value."""
    return (
        "expected every parameter and buffer to have a value, got a module built on "
        f"meta without: {', '.join(sorted(names))}. Build, initialize, cast and copy "
        "it under deferred_init"
    )


def replace_tensors(
    module: nn.Module, replaced: Callable[[Tensor], Tensor]
) -> list[tuple[TensorPlace, Tensor]]:
    """Replace tensors by others, each one once.

    Returns:
        The places of replaced tensors, and what was there.
    """
    undo = [(place, place.tensor) for place in all_places_of(module)]
    new: dict[int, Tensor] = {}
    for place, value in undo:
        if id(value) not in new:
            new[id(value)] = _as(value, replaced(value))
        place.put(new[id(value)])
    return undo


def _as(value: Tensor, data: Tensor) -> Tensor:
    """Return `data` as a parameter if `value` is one."""
    if data is value or not isinstance(value, nn.Parameter):
        return data
    return nn.Parameter(data, requires_grad=value.requires_grad)


def _made(value: Tensor) -> Tensor:
    made = value_of(value) if value.is_meta else None
    return value if made is None else made


def _has_value(value: Tensor) -> bool:
    record = record_of(value) if value.is_meta else None
    return not value.is_meta or (record is not None and bool(record.writes))


def _check_versions(module: nn.Module) -> None:
    """Refuse values that were written to while nothing was recorded."""
    faults = []
    for place in all_places_of(module):
        value = place.tensor
        record = record_of(value) if value.is_meta else None
        if record is not None and record.version is not None:
            if value._version > record.version:
                faults.append(place.name)
    if faults:
        raise PipelineError(
            "deferred_init: expected parameters and buffers to be written to inside "
            f"of it, got writes outside to: {', '.join(faults)}, which are on meta and "
            "keep nothing. Initialize inside; load a state dict into the stages, or "
            "with assign=True."
        )
