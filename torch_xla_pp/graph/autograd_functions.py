"""Functions with a backward of their own, `torch.autograd.Function`, in traced models.

torch.export 2.9 traces their forward as if under `torch.no_grad` and drops their
backward, so that what comes before them gets no gradient. Here each call stays one
operation of the graph, which has both.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.autograd_function import AutogradFunctionApply
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree

from torch_xla_pp.graph.built_in_device import move_devices
from torch_xla_pp.graph.patches import replaced

_APPLY: Any = AutogradFunctionApply.__call__
_PROXY = torch._C._TorchDispatchModeKey.PROXY


class KeptFunction(HigherOrderOperator):
    """A call of a `torch.autograd.Function` as an operation of a graph.

    Args:
        bodies: Its forward and its backward, as torch.export traced them.
        masks: Which of its arguments are tensors, which outputs have no gradient.
    """

    def __init__(
        self, bodies: tuple[fx.GraphModule, fx.GraphModule], masks: dict[str, Any]
    ) -> None:
        super().__init__("autograd_function")  # type: ignore[no-untyped-call]
        # Code that is generated for a graph must find this one, not torch.ops' latest.
        self.__module__ = __name__
        self.bodies = bodies
        self._masks = masks

    def __call__(self, *args: Any) -> Any:
        """Run the forward, and let autograd run the backward."""
        device = next(x.device for x in args if isinstance(x, Tensor))
        for body in self.bodies:
            move_devices(body, device)
        return _APPLY(self, *self.bodies, *args, **self._masks)


@contextlib.contextmanager
def keeping_autograd_functions() -> Iterator[None]:
    """Let torch.export keep the backward of every `torch.autograd.Function`."""
    with replaced(AutogradFunctionApply, "__call__", _keep):
        yield


def _keep(
    self: Any,
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *args: Any,
    **masks: Any,
) -> Any:
    """Leave one node in the graph that is traced, if one is."""
    mode = torch._ops._get_dispatch_mode_pre_dispatch(_PROXY)  # type: ignore[no-untyped-call]
    if mode is None:
        return _APPLY(self, forward, backward, *args, **masks)
    kept, tracer = KeptFunction((forward, backward), masks), mode.tracer
    proxies = pytree.tree_map(tracer.unwrap_proxy, args)
    without_modes: Any = torch._C.DisableTorchFunction
    with disable_proxy_modes_tracing(), without_modes():
        result = kept(*args)
    proxy = tracer.create_proxy("call_function", kept, proxies, {})
    return track_tensor_tree(result, proxy, constant=None, tracer=tracer)
