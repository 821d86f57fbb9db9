"""An operation that takes time and no processor, to try plans for many ranks."""

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torch_xla_pp import cpu

_NAME = "torch_xla_pp::pause"

torch.library.define(
    _NAME, "(Tensor value, float forward_s, float backward_s) -> Tensor"
)


def pause(value: Tensor, forward_s: float, backward_s: float) -> Tensor:
    """Return a value after a time, as if another processor had computed it.

    In a stage's program that is when the program gets there. So more ranks than the
    machine has cores take the times of as many real devices, in any order of actions,
    but for what the package itself computes.

    Args:
        value: Any value of float32, of any shape, on a rank of one CPU device.
        forward_s: Seconds of the forward.
        backward_s: Seconds of its backward, which belongs to the input's gradient.

    Raises:
        TypeError: The value has another dtype.
    """
    if value.dtype != torch.float32:
        raise TypeError(
            f"pause: expected a value of torch.float32, got {value.dtype}. Convert it."
        )
    found: Tensor = torch.ops.torch_xla_pp.pause(value, forward_s, backward_s)
    return found


def _run(value: Tensor, forward_s: float, backward_s: float) -> Tensor:
    if value.device.type == "xla":
        fields = {"time_ns": round(forward_s * 1e9)}
        (found,) = cpu.call_handler("pause", [value], [value.shape], fields)
        return found
    time.sleep(forward_s)
    return value.clone()


def _fake(value: Tensor, forward_s: float, backward_s: float) -> Tensor:
    return torch.empty_like(value)


def _keep_seconds(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.seconds = inputs[1:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    forward_s, backward_s = ctx.seconds
    return pause(grad, backward_s, forward_s), None, None


def _flops(*args: Any, **kwargs: Any) -> int:
    return 0


torch.library.impl(_NAME, "CompositeExplicitAutograd", _run)
torch.library.register_fake(_NAME, _fake)
torch.library.register_autograd(_NAME, _backward, setup_context=_keep_seconds)
register_flop_formula(torch.ops.torch_xla_pp.pause)(_flops)
