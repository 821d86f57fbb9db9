"""GELU in programs for one CPU device.

XLA computes its error function by a quotient, with vectors of half the width that the
processor has. Here it and its gradient are calls of `csrc/`, whose absolute error is
some 1e-7, as that of XLA's.
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
