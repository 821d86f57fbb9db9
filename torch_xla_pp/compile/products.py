"""Multiply matrices with PyTorch's library in programs for one CPU device.

On a CPU, Intel's MKL multiplies up to twice as fast as XLA does, and it is there: it
comes inside of PyTorch. So a program of a rank with one CPU device calls it for its
products of two float32 matrices; all else is XLA's. The threads are XLA's, too: the
library computes each part of a product on the thread that XLA gives to it.

XLA cannot split a call over devices. So ranks of several devices have XLA's products,
as have other devices, builds of PyTorch without MKL, and who sets
`TORCH_XLA_PP_PRODUCTS=xla`.
"""

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from torch_xla_pp import env, native, xla_compat
from torch_xla_pp.compile.ops import is_transpose
from torch_xla_pp.compile.running import Running
from torch_xla_pp.hlo import OWN_PRODUCT

_MAX_SIDE = (1 << 31) - 1  # of MKL's integers
_aten = torch.ops.aten
_logger = logging.getLogger(__name__)


def has_own_products() -> bool:
    """Return whether this rank's programs multiply with PyTorch's library."""
    is_single = xla_compat.num_local_devices() == 1
    return is_single and env.products() == "torch" and _can_multiply()


@functools.cache
def _can_multiply() -> bool:
    """Tell the handlers where PyTorch's library is; return whether it is there."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        handlers = native.library()
        library = ctypes.CDLL(str(path))
        calls = (library.sgemm_, library.MKL_Set_Num_Threads_Local)
    except (native.Unavailable, OSError, AttributeError) as reason:
        _logger.info("XLA multiplies matrices itself: %s", reason)
        return False
    handlers.xpp_use_blas(*(ctypes.cast(call, ctypes.c_void_p) for call in calls))
    return True


class OwnProducts(Running):
    """Run a function's graph on pending values; products are calls of the library."""

    def run_operation(self, node: fx.Node) -> Any:
        """Run one operation; a product of matrices by the library."""
        if node.target is _aten.mm.default:
            product = self._product(*node.args)
            return super().run_operation(node) if product is None else product
        if node.target is _aten.addmm.default and not node.kwargs:
            bias: Any = node.args[0]
            product = self._product(*node.args[1:])
            if product is not None:
                return product + self.env[bias]
        return super().run_operation(node)

    def _product(self, *factors: Any) -> Tensor | None:
        """Multiply two matrices, None if the library cannot."""
        (left, is_left_turned), (right, is_right_turned) = map(self._stored, factors)
        if not left.dtype == right.dtype == torch.float32:
            return None
        sides = {
            "rows": left.shape[1 if is_left_turned else 0],
            "depth": left.shape[0 if is_left_turned else 1],
            "columns": right.shape[0 if is_right_turned else 1],
        }
        if not all(0 < side <= _MAX_SIDE for side in sides.values()):
            return None
        turned = {
            "is_left_turned": int(is_left_turned),
            "is_right_turned": int(is_right_turned),
        }
        target = ".".join(map(str, [OWN_PRODUCT, *sides.values(), *turned.values()]))
        native.register_target(target, "product")
        whole = xla_compat.replicated_sharding()
        shards = [xla_compat.to_shards(factor, whole) for factor in (left, right)]
        shape = (sides["rows"], sides["columns"])
        (result,) = xla_compat.custom_call(
            target, shards, [shape], [torch.float32], {**sides, **turned}
        )
        return xla_compat.from_shards(result, whole, shape, torch.float32)

    def _stored(self, node: fx.Node) -> tuple[Tensor, bool]:
        """Return a matrix as it was before it was transposed, and whether it was."""
        is_turned = False
        while is_transpose(node, 2):
            node = node.all_input_nodes[0]
            is_turned = not is_turned
        return self.env[node], is_turned
