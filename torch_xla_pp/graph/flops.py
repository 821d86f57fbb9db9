"""Estimate the work of a traced module without running it."""

import logging
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

_logger = logging.getLogger(__name__)


class _Flat(nn.Module):
    """A traced module that takes flat inputs, and counts the FLOPs of each op.

    Attributes:
        counts: Name of an op → its count.
    """

    def __init__(self, traced: fx.GraphModule, counter: FlopCounterMode) -> None:
        super().__init__()
        self.traced = traced
        self.counts: dict[str, int] = {}
        self._counter = counter

    def forward(self, *inputs: Any) -> Any:
        interpreter = _Counting(self.traced, self._counter, self.counts)
        return interpreter.run(*inputs, enable_io_processing=False)


class _Counting(fx.Interpreter):
    """An interpreter of a graph that reads a counter after each op."""

    def __init__(
        self, traced: fx.GraphModule, counter: FlopCounterMode, counts: dict[str, int]
    ) -> None:
        super().__init__(traced)
        self._counter = counter
        self._counts = counts

    def run_node(self, n: fx.Node) -> Any:
        before = self._counter.get_total_flops()
        result = super().run_node(n)
        self._counts[n.name] = self._counter.get_total_flops() - before
        return result


def forward_flops(traced: fx.GraphModule) -> int | None:
    """Count the floating-point operations of matrix products in a module's forward.

    Values are fake: nothing is computed and no memory is taken. It costs about as
    much time as tracing the module.

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
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    counter = _counter()
    module = _Flat(traced, counter)
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    examples = _examples(traced)
    # Models on meta are traced as if they were on the host.
    homes = [x.device for x in examples if isinstance(x, Tensor)]
    home = homes[0] if homes else None
    with torch.no_grad(), mode:
        state = {name: _like(value, home) for name, value in held.items()}
        with counter:
            torch.func.functional_call(module, state, examples)
    return module.counts


def _counter() -> FlopCounterMode:
    """Return a counter that also counts the attention of the host."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def count(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        flops: int = sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
        return flops

    return FlopCounterMode(display=False, custom_mapping={attention: count})


def _examples(traced: fx.GraphModule) -> tuple[Any, ...]:
    """Return new tensors like those that the module was traced with."""
    nodes = [node for node in traced.graph.nodes if node.op == "placeholder"]
    return tuple(_like(node.meta.get("val")) for node in nodes)


def _like(value: Any, device: torch.device | None = None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(
        tuple(value.shape),
        value.stride(),
        dtype=value.dtype,
        device=device or value.device,
    )
