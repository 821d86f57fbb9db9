"""Constraints on how activations are sharded, by logical axes.

`shard` does nothing to a value. While a model or a stage is traced it leaves an
operator in the graph, in the forward and for the gradient in the backward. The names of
axes are resolved only when the stage is compiled.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from torch_xla_pp.mesh import LogicalAxes, first_match

_NAME = "torch_xla_pp::shard"

# Lists of optional texts cannot be arguments of an operator.
_WHOLE = ""

_mapped_axis: ContextVar[str] = ContextVar("mapped_axis", default=_WHOLE)

torch.library.define(_NAME, "(Tensor value, str[] axes) -> Tensor")


def _copy(value: Tensor, axes: Sequence[str]) -> Tensor:
    """Return a copy: an operator must not return an alias of its operand."""
    return value.clone()


def _fake(value: Tensor, axes: Sequence[str]) -> Tensor:
    return torch.empty_like(value)


def _batched(
    info: Any, in_dims: tuple[Any, ...], value: Tensor, axes: Sequence[str]
) -> tuple[Tensor, int]:
    """Shard the dimension that vmap adds by the axis of `mapped_as`, or not at all."""
    dim = in_dims[0]
    return SHARD(value, [*axes[:dim], _mapped_axis.get(), *axes[dim:]]), dim


def _keep_axes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.axes = inputs[1]


def _backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
    return SHARD(grad, context.axes), None


torch.library.impl(_NAME, "CompositeExplicitAutograd", _copy)
torch.library.register_fake(_NAME, _fake)
torch.library.register_vmap(_NAME, _batched)
torch.library.register_autograd(_NAME, _backward, setup_context=_keep_axes)

SHARD = torch.ops.torch_xla_pp.shard.default


def shard(value: Tensor, *axes: str | None) -> Tensor:
    """Shard an activation over the devices of a rank, and return it.

    In a stage that was built with `AxisRules`, these determine the sharding of the
    value and its gradient. With other shardings, and outside of stages, nothing
    happens.

    Args:
        value: The activation.
        *axes: The logical axis of each of its dimensions, None for a whole one.

    Raises:
        ValueError: There are more or fewer axes than dimensions.

    Example:
        >>> def forward(self, x):
        ...     hidden = shard(self.up(x), "batch", "sequence", "mlp")
        ...     return shard(self.down(hidden.relu()), "batch", "sequence", "embed")
    """
    if len(axes) != value.dim():
        raise ValueError(
            f"shard: expected one logical axis or None for each of the {value.dim()} "
            f"dimensions of shape {list(value.shape)}, got {axes}. Name them all."
        )
    if torch.compiler.is_compiling():
        return shard_in_graph(value, *axes)
    return value


def shard_in_graph(value: Tensor, *axes: str | None) -> Tensor:
    """Call the operator that `shard` leaves in a graph."""
    names = [_WHOLE if name is None else name for name in axes]
    return SHARD(value, names)  # type: ignore[no-any-return]


def axes_of(names: Sequence[str]) -> tuple[str | None, ...]:
    """Return the logical axes that the operator was called with."""
    return tuple(name or None for name in names)


@contextlib.contextmanager
def mapped_as(axis: str) -> Iterator[None]:
    """Give the dimension that `torch.vmap` adds in the context a logical axis."""
    token = _mapped_axis.set(axis)
    try:
        yield
    finally:
        _mapped_axis.reset(token)


@contextlib.contextmanager
def sharding_outputs(
    module: nn.Module, activations: Mapping[str, Sequence[str | None]]
) -> Iterator[None]:
    """Pass the results of submodules through `shard`, inside the context.

    Args:
        module: The module; unchanged after the context.
        activations: Glob pattern on the names of its submodules → logical axes; the
            first match counts.

    Raises:
        ValueError: Such a submodule returns something other than one tensor.
    """
    hooks = []
    for name, submodule in module.named_modules():
        pattern = first_match(activations, name) if name else None
        if pattern is not None:
            pin = functools.partial(_pin, name, tuple(activations[pattern]))
            hooks.append(submodule.register_forward_hook(pin))
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def _pin(
    name: str, axes: LogicalAxes, module: nn.Module, args: Any, output: Any
) -> Tensor:
    """Pass a submodule's result through `shard`."""
    if not isinstance(output, Tensor) or output.dim() != len(axes):
        got = (
            f"a tensor of shape {list(output.shape)}"
            if isinstance(output, Tensor)
            else type(output).__name__
        )
        raise ValueError(
            f"AxisRules.activations: expected {name} to return one tensor of "
            f"{len(axes)} dimensions, for {axes}, got {got}. Correct the pattern, "
            "or call shard in forward."
        )
    return shard(output, *axes)


def pinned_axes(hook: Any) -> LogicalAxes | None:
    """Return the axes of a hook of `sharding_outputs`, None for other hooks."""
    is_pin = isinstance(hook, functools.partial) and hook.func is _pin
    return hook.args[1] if is_pin else None
