"""Values as sums of parts, one for each group of rows of a batch.

The *parts* of a value are a value with a first dimension of one entry per group, whose
sum over that dimension is the value. They are found by following the graph back from
the value: through linear operations, to those that sum over the batch, which are cut
into groups. The law: parts add up to the value whatever the module computes, since both
kinds of operations are known one by one; the search ends at any other operation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from torch_xla_pp.compile.group_sums.batch_dims import Place
from torch_xla_pp.compile.group_sums.row_groups import RowGroups
from torch_xla_pp.compile.joint_graph import JointGraph

_PARTS_OF = "parts_of"


class GradientParts:
    """The parts of values, added to a joint graph as they are asked for.

    Args:
        joint: The graph.
        rows: The groups.
        places: Where values have the batch.
        rules: Operation → the rule that makes the parts of its result.

    Attributes:
        rows: The groups.
        places: Where values have the batch.
        stopped: Value without parts → the operation at which the search ended.
    """

    def __init__(
        self,
        joint: JointGraph,
        rows: RowGroups,
        places: Mapping[fx.Node, Place],
        rules: Mapping[Any, "Rule"],
    ) -> None:
        self._joint = joint
        self._rules = rules
        self._known: dict[fx.Node, fx.Node | None] = {}
        self.rows = rows
        self.places = places
        self.stopped: dict[fx.Node, str] = {}

    def of(self, node: fx.Node) -> fx.Node | None:
        """Return the parts of a value, None if it has none."""
        if node not in self._known:
            rule = self._rules.get(node.target) if _is_float(node) else None
            found = None if rule is None else rule(self, node)
            self._known[node] = found
            if found is None:
                ends = [
                    self.stopped[n] for n in node.all_input_nodes if n in self.stopped
                ]
                self.stopped[node] = ends[0] if rule and ends else str(node.target)
        return self._known[node]

    def sizes(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the parts of a value."""
        return [self.rows.size, *shape]

    def call(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add an operation that computes parts of `node`, right behind it."""
        behind = node.next
        while behind.meta.get(_PARTS_OF) is node:
            behind = behind.next
        with self._joint.graph.graph.inserting_before(behind):
            made = self._joint.graph.graph.call_function(target, args, kwargs)
        made.meta[_PARTS_OF] = node
        if node in self._joint.regions:
            self._joint.regions[made] = self._joint.regions[node]
        return made


Rule: TypeAlias = Callable[[GradientParts, fx.Node], fx.Node | None]


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point
