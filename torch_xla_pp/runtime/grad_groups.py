"""Which gradients of a stage are summed up per group of rows, and how."""

from collections.abc import Mapping, Sequence

from torch_xla_pp.compile import Grouping, RowGroups
from torch_xla_pp.mesh import OpShardingArgs, TensorSpec
from torch_xla_pp.runtime.placement import Placement


def grouping_of(
    placement: Placement,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    parameters: Mapping[str, tuple[OpShardingArgs, int]],
) -> Grouping | None:
    """Return the groups of rows of a stage, None if rows are not split.

    Args:
        placement: The devices of this rank.
        inputs: What the stage takes.
        outputs: What it makes.
        parameters: Role → how a parameter lies where it is used, and the number of its
            dimensions. Those that are split over the batch axis have no sums per
            group: their gradient is split from the start.
    """
    if placement.num_groups == 1:
        return None
    dims: dict[str, int] = {}
    for name, specs in (("input", inputs), ("tangent", outputs)):
        for index, spec in enumerate(specs):
            dim = placement.batch_dim(spec.partition)
            dims |= {} if dim is None else {f"{name}:{index}": dim}
    sums = {
        role: placement.stacked(layout, num_dims)
        for role, (layout, num_dims) in parameters.items()
    }
    return Grouping(
        RowGroups(placement.num_groups, placement.rows_layout),
        dims,
        {role: sharding for role, sharding in sums.items() if sharding is not None},
    )
