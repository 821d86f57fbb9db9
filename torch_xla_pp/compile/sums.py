"""The sums of a step's gradients: how they begin.

Every backward adds to sums that it takes over (their buffers are donated), so a step
begins with sums of its own. They start from what the parameters have in `.grad`, which
the user may keep, or from zero.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, fx, nn

from torch_xla_pp.compile.partition import Function, accumulator


def given_grad(role: str) -> str:
    """Return the name under which the present gradient of a parameter is passed."""
    return f"grad:{role}"


def starting_sums(parameters: Mapping[str, Tensor], given: Collection[str]) -> Function:
    """Return the function that makes new sums.

    Args:
        parameters: Role → parameter that gets a sum.
        given: The roles of those among them that have a gradient already.
    """
    graph = fx.Graph()
    inputs = {role: graph.placeholder(f"grad_{i}") for i, role in enumerate(given)}
    sums = [
        # A product is a new buffer, even where the program does nothing else.
        graph.call_function(torch.mul, (inputs[role], 1))
        if role in inputs
        else graph.call_function(
            torch.zeros,
            (tuple(parameter.shape),),
            {"dtype": parameter.dtype, "device": parameter.device},
        )
        for role, parameter in parameters.items()
    ]
    graph.output(tuple(sums))
    return Function(
        name="gradient sums",
        module=fx.GraphModule(nn.Module(), graph),
        inputs=tuple(given_grad(role) for role in inputs),
        outputs=tuple(accumulator(role) for role in parameters),
    )
