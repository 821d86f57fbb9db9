"""The device that a traced graph has built in."""

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate


def move_devices(traced: fx.GraphModule, device: torch.device) -> None:
    """Let a graph make its constants, and move values, on `device`.

    Upstream's own function does not change the device of `tensor.to(other.device)`,
    which is a positional argument.
    """
    found = False

    def moved(argument: Any) -> Any:
        nonlocal found
        if isinstance(argument, torch.device) and argument != device:
            found = True
            return device
        return argument

    for node in traced.graph.nodes:
        node.args = map_aggregate(node.args, moved)
        node.kwargs = map_aggregate(node.kwargs, moved)
    if found:
        traced.recompile()
