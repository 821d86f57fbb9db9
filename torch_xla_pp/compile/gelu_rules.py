"""The rule by which GELU and its gradient are calls of `csrc/`, see `lowering`.

For CPU devices. The approximation by a hyperbolic tangent is XLA's.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from torch_xla_pp.cpu import fits_own_ops, gelu, gelu_grad

_aten = torch.ops.aten
_CALLS = {_aten.gelu.default: gelu, _aten.gelu_backward.default: gelu_grad}


def run_gelu(
    node: fx.Node, values: Mapping[fx.Node, Any], _: object, /
) -> Tensor | None:
    """Run GELU of float32 values, and its gradient."""
    call: Any = _CALLS.get(node.target)  # type: ignore[call-overload]
    if call is None or node.kwargs.get("approximate", "none") != "none":
        return None
    operands = [values[operand] for operand in node.args]  # type: ignore[index]
    return call(*operands) if all(map(fits_own_ops, operands)) else None
