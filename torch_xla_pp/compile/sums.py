"""The sums of a step's gradients: how they begin, and how they end.

Every backward adds to sums that it takes over (their buffers are donated), so a step
begins with sums of its own. They start from what the parameters have in `.grad`, which
the user may keep, or from zero.

Sums that are kept per group of rows (see `compile.group_sums`) start from zero. At
the end of the step one program adds the groups up, and what is in `.grad`: there, once
a step, devices exchange gradients.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from torch_xla_pp.compile.names import accumulated, accumulator, copied, given_grad
from torch_xla_pp.compile.partition import Function


def starting_sums(
    parameters: Mapping[str, Tensor],
    given: Collection[str],
    groups: Mapping[str, int],
) -> Function:
    """Return the function that makes new sums.

    Args:
        parameters: Role → parameter that gets a sum.
        given: The roles of those among them that start from their gradient.
        groups: Role → number of groups, of those with a sum for each.
    """
    graph = fx.Graph()
    inputs = {role: graph.placeholder(f"grad_{i}") for i, role in enumerate(given)}
    sums = [
        # A product is a new buffer, even where the program does nothing else.
        graph.call_function(torch.mul, (inputs[role], 1))
        if role in inputs
        else graph.call_function(
            torch.zeros,
            ((*([groups[role]] if role in groups else []), *parameter.shape),),
            {"dtype": parameter.dtype, "device": parameter.device},
        )
        for role, parameter in parameters.items()
    ]
    return _function(
        "gradient sums",
        graph,
        sums,
        [given_grad(role) for role in inputs],
        [accumulator(role) for role in parameters],
    )


def reduced_sums(roles: Collection[str], given: Collection[str]) -> Function:
    """Return the function that adds up the groups of sums.

    Args:
        roles: The parameters with sums per group.
        given: Those among them that have a gradient already.
    """
    graph = fx.Graph()
    grouped = {role: graph.placeholder(f"sum_{i}") for i, role in enumerate(roles)}
    grads = {role: graph.placeholder(f"grad_{i}") for i, role in enumerate(given)}
    totals = []
    for role, parts in grouped.items():
        total = graph.call_function(torch.sum, (parts, 0))
        if role in grads:
            total = graph.call_function(torch.add, (grads[role], total))
        totals.append(total)
    return _function(
        "gradient reduction",
        graph,
        totals,
        [*map(accumulator, grouped), *map(given_grad, grads)],
        [accumulated(role) for role in grouped],
    )


def copies(names: Sequence[str]) -> Function:
    """Return the function that copies values, to be laid out anew."""
    graph = fx.Graph()
    values = [graph.placeholder(f"value_{i}") for i, _ in enumerate(names)]
    results = [graph.call_function(torch.mul, (value, 1)) for value in values]
    return _function(
        "gathering of weights", graph, results, names, [copied(n) for n in names]
    )


def _function(
    name: str,
    graph: fx.Graph,
    results: Sequence[fx.Node],
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> Function:
    graph.output(tuple(results))
    module = fx.GraphModule(nn.Module(), graph)
    return Function(
        name=name, module=module, inputs=tuple(inputs), outputs=tuple(outputs)
    )
