"""The joint graph of a stage: its forward and backward in one functional graph.

Its placeholders are named by their role, see `compile.names`, and its results are
listed by role.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from torch_xla_pp.compile.ops import views
from torch_xla_pp.graph import SHARD, Template, axes_of
from torch_xla_pp.mesh import LogicalAxes

# These return their operand's value, sharded as it is, maybe in another dtype.
_SAME_VALUE = {
    *views("same"),
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
}


@dataclass(kw_only=True, slots=True)
class JointGraph:
    """The joint graph of one stage for one signature.

    Args:
        graph: The FX graph; its placeholders are keyed by `roles`.
        roles: Placeholder → role, see `compile.names`.
        constants: Values of the placeholders of constants: literals, and tensors that
            the module reads from closures, globals or attributes.
        outputs: The node of each tensor output of the stage.
        outputs_need_grad: Whether each of them has a gradient.
        output_template: How the outputs are put together for the caller.
        buffer_updates: Buffer role → node of its new value.
        parameter_grads: Parameter role → node of its gradient.
        input_grads: Input index → node of its gradient, None where the stage's
            outputs do not depend on that input.
        regions: Node → the region in which it was made; for a node of the backward,
            that of the operation whose gradient it computes.
        selected: Nodes that a selective checkpoint saves.
        copied: Which outputs are copies, as they would share memory with an input or
            another output.

    In-place updates of inputs are not kept: inputs belong to the pipeline.
    """

    graph: fx.GraphModule
    roles: dict[fx.Node, str]
    constants: dict[str, Tensor]
    outputs: list[fx.Node]
    outputs_need_grad: list[bool]
    output_template: Template
    buffer_updates: dict[str, fx.Node] = field(default_factory=dict)
    parameter_grads: dict[str, fx.Node] = field(default_factory=dict)
    input_grads: dict[int, fx.Node | None] = field(default_factory=dict)
    regions: dict[fx.Node, int] = field(default_factory=dict)
    selected: set[fx.Node] = field(default_factory=set)
    copied: frozenset[int] = frozenset()

    @property
    def constraints(self) -> list[tuple[LogicalAxes, Tensor]]:
        """Return the axes that `shard` was called with, each with its value's metadata.

        Those of gradients are among them.
        """
        nodes = self.graph.graph.find_nodes(op="call_function", target=SHARD)
        return [(axes_of(node.args[1]), node.meta["val"]) for node in nodes]

    @property
    def output_axes(self) -> list[LogicalAxes | None]:
        """Return the axes of each output that comes from `shard`, None for others.

        In between there may be a change of dtype.
        """
        return [_constraint_of(node) for node in self.outputs]

    @property
    def num_random(self) -> int:
        """Return how many random operations the stage has."""
        return sum(is_random(node) for node in self.graph.graph.nodes)

    @property
    def example_outputs(self) -> list[tuple[Tensor, bool]]:
        """Return the metadata of each output and whether it needs a gradient."""
        values = [node.meta["val"] for node in self.outputs]
        return list(zip(values, self.outputs_need_grad, strict=True))


def _constraint_of(node: fx.Node) -> LogicalAxes | None:
    while node.target in _SAME_VALUE:
        node = node.all_input_nodes[0]
    return axes_of(node.args[1]) if node.target is SHARD else None  # type: ignore[arg-type]


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
