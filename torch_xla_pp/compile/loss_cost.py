"""The cost of a loss and its gradient, and operations whose cost is unknown."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from torch_xla_pp.compile.atom_costs import cost_of_function
from torch_xla_pp.compile.export import export_joint
from torch_xla_pp.compile.loss_program import split_loss
from torch_xla_pp.compile.partition import value_and_grads
from torch_xla_pp.compile.value_parts import bytes_of_value
from torch_xla_pp.graph import CallSpec
from torch_xla_pp.work import Cost

_DEVICE = torch.device("xla:0")
# Operations of torch are counted, or move bytes alone; those of this package are marks.
_KNOWN = ("aten", "prims", "prim", "higher_order", "torch_xla_pp", "xla")


class _Loss(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, output: Any, target: Any) -> Any:
        return split_loss(self.function(output, target))


def cost_of_loss(
    output: Any, loss_fn: Callable[..., Any], target: Any, rows: int
) -> Cost:
    """Return what the program of a loss and its gradient costs.

    Args:
        output: Example of what the model returns.
        loss_fn: Takes what the model returns and the target, returns a scalar.
        target: Example of a microbatch's target.
        rows: Rows of the microbatch.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Tensor) -> Tensor:
        size, stride = tuple(value.shape), value.stride()
        data = torch.empty_strided(size, stride, dtype=value.dtype, device="meta")
        return FakeTensor(mode, data, device)

    # Tensors that the function reads from outside are on the target's device.
    device = next(
        (x.device for x in pytree.tree_leaves(target) if isinstance(x, Tensor)), _DEVICE
    )
    output, target = pytree.tree_map_only(Tensor, fake, (output, target))
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaf.requires_grad_()
    joint = export_joint(_Loss(loss_fn), (output, target), {})
    return cost_of_function(joint, value_and_grads(joint), rows)


def returned_by(traced: fx.GraphModule) -> Any:
    """Return examples of what a model returns, as it returns them."""
    (output,) = traced.graph.find_nodes(op="output")
    leaves = [
        leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf
        for leaf in pytree.tree_leaves(output.args[0])
    ]
    spec = CallSpec.of(traced.graph).outputs
    return leaves if spec is None else pytree.tree_unflatten(leaves, spec)


def unknown_ops(traced: fx.GraphModule) -> dict[str, float]:
    """Return the operations whose FLOPs are unknown, with their share of all bytes."""
    sizes: Counter[str] = Counter()
    total = 0
    for node in traced.graph.nodes:
        if node.op != "call_function":
            continue
        num_bytes = bytes_of_value(node.meta.get("val"))
        total += num_bytes
        target = node.target
        is_own = isinstance(target, OpOverload) and target.namespace not in _KNOWN
        if is_own and target.overloadpacket not in flop_registry:
            sizes[str(target)] += num_bytes
    return {name: count / total for name, count in sorted(sizes.items()) if total}
