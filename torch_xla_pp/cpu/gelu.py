"""GELU in programs for one CPU device.

XLA computes the error function of each value in the forward and again in the backward,
in a loop that takes twice as long as this one of `csrc/gelu.cc`.
"""

from torch import Tensor

from torch_xla_pp.cpu.handlers import call_handler


def gelu(value: Tensor) -> Tensor:
    """Return each element of a float32 value times the share of a normal's below it."""
    return call_handler("gelu", [value], [value.shape], {})[0]


def gelu_grad(grad: Tensor, value: Tensor) -> Tensor:
    """Return the gradient of a value, from that of its GELU."""
    return call_handler("gelu_grad", [grad, value], [value.shape], {})[0]
