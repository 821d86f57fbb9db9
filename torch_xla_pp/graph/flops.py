"""Estimate the work of a traced module without running it."""

import logging
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

_logger = logging.getLogger(__name__)


class _Flat(nn.Module):
    """A traced module that takes flat inputs."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__()
        self.traced = traced

    def forward(self, *inputs: Any) -> Any:
        interpreter = fx.Interpreter(self.traced)
        return interpreter.run(*inputs, enable_io_processing=False)


def forward_flops(traced: fx.GraphModule) -> int | None:
    """Count the floating-point operations of matrix products in a module's forward.

    Values are fake: nothing is computed and no memory is taken. It costs about as
    much time as tracing the module.

    Returns:
        The count by `torch.utils.flop_counter`, None if it cannot run the module.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    module = _Flat(traced)
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state: dict[str, Tensor] = {
        name: mode.from_tensor(value) for name, value in held.items()
    }
    try:
        with torch.no_grad(), mode, _counter() as counter:
            torch.func.functional_call(module, state, _examples(traced))
    except Exception as error:
        _logger.debug("the FLOPs of a stage are unknown: %s", error)
        return None
    return int(counter.get_total_flops())


def _counter() -> FlopCounterMode:
    """Return a counter that knows attention on the host, where models are traced."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def count(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        flops: int = sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
        return flops

    return FlopCounterMode(display=False, custom_mapping={attention: count})


def _examples(traced: fx.GraphModule) -> tuple[Any, ...]:
    """Return new tensors like those that the module was traced with."""
    nodes = [node for node in traced.graph.nodes if node.op == "placeholder"]
    return tuple(_like(node.meta.get("val")) for node in nodes)


def _like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(
        tuple(value.shape), value.stride(), dtype=value.dtype, device=value.device
    )
