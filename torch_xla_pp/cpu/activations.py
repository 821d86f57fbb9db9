"""GELU in programs for CPU devices.

XLA computes its error function by a quotient, with vectors of 8 numbers. Here it and
its gradient are calls of `csrc/`. The error of GELU by its input is at most 2e-7, that
of its derivative 4e-7; XLA's are both 2e-7.
"""

from torch import Tensor

from torch_xla_pp.cpu.handlers import call_handler


def gelu(value: Tensor) -> Tensor:
    """Return the GELU of a float32 value, not empty."""
    return call_handler("gelu", [value], [value.shape], {"count": value.numel()})[0]


def gelu_grad(grad: Tensor, value: Tensor) -> Tensor:
    """Return the gradient of the input of a GELU, from that of its result."""
    fields = {"count": value.numel()}
    return call_handler("gelu_grad", [grad, value], [value.shape], fields)[0]
