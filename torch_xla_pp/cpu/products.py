"""Products of matrices by PyTorch's library in programs for one CPU device.

On a CPU, Intel's MKL multiplies up to twice as fast as XLA does, and it comes with
PyTorch. So a program of a rank with one CPU device calls it for its products of two
float32 matrices; all else is XLA's. The threads are XLA's, too: the
library computes each part of a product on the thread that XLA gives to it.

XLA cannot split a call over devices. So ranks of several devices have XLA's products;
so do ranks on other kinds of devices, or with a build of PyTorch without MKL, or under
`TORCH_XLA_PP_PRODUCTS=xla`.
"""

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from torch_xla_pp import env, native, xla_compat
from torch_xla_pp.hlo import OWN_PRODUCT

Product: TypeAlias = Callable[[Tensor, Tensor, bool, bool], Tensor | None]
"""A product of two matrices, given as they are stored and whether each is transposed.

It returns None for what it cannot multiply.
"""

_MAX_SIDE = (1 << 31) - 1  # of MKL's integers
_logger = logging.getLogger(__name__)


@functools.cache
def library_product() -> Product | None:
    """Return the product of PyTorch's library, None where programs have XLA's.

    Decided at the first call, when the rank's devices are known, and kept.
    """
    is_one = env.device_kind() == "CPU" and xla_compat.num_local_devices() == 1
    is_used = is_one and env.products() == "torch" and _can_multiply()
    return multiply if is_used else None


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


def multiply(
    left: Tensor, right: Tensor, is_left_turned: bool, is_right_turned: bool
) -> Tensor | None:
    """Multiply two matrices that are stored as they are or transposed."""
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
