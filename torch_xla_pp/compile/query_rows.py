"""Keep the scores of attention on the devices that have their queries.

Without a kernel a backward computes scores again. Where a rank's devices share the
sequence, XLA may split this product by another of its dimensions, and then moves
scores: of all values of attention none has as many numbers. So scores are sharded as
queries are, by an operation of `shard`.
"""

from collections.abc import Callable

from torch import fx

from torch_xla_pp.compile.joint_graph import JointGraph
from torch_xla_pp.compile.mesh_parts import ValueParts
from torch_xla_pp.graph import SCORES_OF, SHARD
from torch_xla_pp.mesh import on_mesh

_LENGTH = 2


def shard_scores(joint: JointGraph, parts_of: Callable[[], ValueParts]) -> None:
    """Turn the marks of scores into calls of `shard`, or take them out.

    Args:
        joint: The graph.
        parts_of: Returns how its values are split; called if it has marks.
    """
    marks = joint.graph.graph.find_nodes(op="call_function", target=SCORES_OF)
    if not marks:
        return
    parts = parts_of()
    for mark in marks:
        scores, query = mark.all_input_nodes
        partition = parts.cut(query)
        if partition is None or partition[_LENGTH] is None:
            _take_out(joint, mark, scores)
            continue
        mark.target = SHARD
        mark.args = scores, [*map(on_mesh, partition[: _LENGTH + 1]), ""]
    joint.graph.recompile()


def _take_out(joint: JointGraph, mark: fx.Node, scores: fx.Node) -> None:
    mark.replace_all_uses_with(scores)
    joint.graph.graph.erase_node(mark)
    joint.regions.pop(mark, None)
    joint.selected.discard(mark)
