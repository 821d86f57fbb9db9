"""Gradients of parameters as sums per group of rows.

A gradient is a sum over the rows of a microbatch, most often in its last operations. If
rows are split over devices, these have to add up, after each microbatch. So this pass
replaces a gradient by its parts, one for each group of rows (see `gradient_parts.py`).
The parts of many microbatches are added up without any exchange.

Source: that data-parallel gradients are best reduced once a step, after the loop over
microbatches, is in section 5.2.1 of the JaxPP paper (Xhebraj et al., Scaling Deep
Learning Training with MPMD Pipeline Parallelism, 2024).
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.group_sums.batch_dims import Place, batch_places
from torch_xla_pp.compile.group_sums.gradient_parts import GradientParts
from torch_xla_pp.compile.group_sums.part_rules import RULES
from torch_xla_pp.compile.group_sums.row_groups import RowGroups
from torch_xla_pp.compile.joint_graph import JointGraph


class Grouping(NamedTuple):
    """The gradients that are summed up per group of rows, and the groups.

    Attributes:
        rows: The groups.
        dims: Role of an input or tangent → the dimension of the batch.
        sums: Role of a parameter → sharding of the sums of its gradient; parameters
            that are left out have one sum.
    """

    rows: RowGroups
    dims: Mapping[str, int]
    sums: Mapping[str, xla_compat.OpSharding]


def group_gradients(joint: JointGraph, grouping: Grouping) -> dict[str, str]:
    """Replace gradients in a joint graph by their parts.

    Args:
        joint: Changed in place.
        grouping: Which gradients, and the groups.

    Returns:
        Role → reason, for the parameters whose gradient is not replaced.
    """
    rows = grouping.rows
    known = {
        node: Place(grouping.dims[role])
        for node, role in joint.roles.items()
        if role in grouping.dims
    }
    places = batch_places(joint.graph.graph, known, rows.size)
    parts = GradientParts(joint, rows, places, RULES)
    refused: dict[str, str] = {}
    for role, grad in joint.parameter_grads.items():
        if role not in grouping.sums:
            refused[role] = "the parameter is split over the batch axis"
            continue
        found = parts.of(grad)
        if found is None:
            refused[role] = f"{parts.stopped[grad]} is not cut into groups of rows"
        else:
            joint.parameter_grads[role] = found
    return refused
