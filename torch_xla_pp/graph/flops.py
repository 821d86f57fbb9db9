"""Estimate the work of a traced module without running it."""

import logging
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

_logger = logging.getLogger(__name__)


def forward_flops(traced: fx.GraphModule) -> int | None:
    """Count the floating-point operations of matrix products in a module's forward.

    Values are fake: nothing is computed and no memory is taken.

    Returns:
        The count by `torch.utils.flop_counter`, None if it cannot run the module.
    """
    try:
        return sum(flops_by_op(traced).values())
    except Exception as error:
        _logger.debug("the FLOPs of a stage are unknown: %s", error)
        return None


def flops_by_op(traced: fx.GraphModule) -> dict[str, int]:
    """Count the same for each operation, by its name; raises if it cannot run."""
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        return _OpCounts().of(traced)


class _OpCounts:
    """The FLOPs of operations, each of which is run once for operands of one kind."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], int] = {}

    def of(self, module: Any) -> dict[str, int]:
        """Return the count of each operation of a traced module, by its name."""
        return {node.name: self._of_node(node, module) for node in module.graph.nodes}

    def _of_node(self, node: fx.Node, owner: Any) -> int:
        if node.op not in ("call_function", "call_module"):
            return 0
        function: Any = node.target
        if node.op == "call_module":
            function = owner.get_submodule(node.target)
            if hasattr(function, "graph"):
                return sum(self.of(function).values())

        def value_of(source: fx.Node) -> Any:
            if "val" in source.meta:
                return source.meta["val"]
            return reduce(getattr, str(source.target).split("."), owner)

        given = fx.map_arg((node.args, node.kwargs), value_of)
        leaves, tree = pytree.tree_flatten(given)
        key = (function, tree, *map(_kind, leaves))
        if key not in self._known:
            args, kwargs = pytree.tree_unflatten(map(_like, leaves), tree)
            with _counter() as counter:
                function(*args, **kwargs)
            self._known[key] = counter.get_total_flops()
        return self._known[key]


def _kind(value: Any) -> Any:
    """Return a key that is the same for values with which an op does equal work."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return type(value), value


def _counter() -> FlopCounterMode:
    """Return a counter that also counts the attention of the host."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def count(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        flops: int = sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
        return flops

    return FlopCounterMode(display=False, custom_mapping={attention: count})


def _like(value: Any) -> Any:
    """Return a new tensor like another one, or the value that is no tensor."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(
        tuple(value.shape), value.stride(), dtype=value.dtype, device=value.device
    )
