"""The choice of gradients of a stage that are summed up per group of rows."""

from collections.abc import Mapping, Sequence

from torch_xla_pp.compile.group_sums.group_gradients import Grouping
from torch_xla_pp.compile.group_sums.row_groups import RowGroups
from torch_xla_pp.hlo import OpShardingArgs
from torch_xla_pp.mesh import TensorSpec
from torch_xla_pp.world import World


def grouping_of(
    world: World,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    parameters: Mapping[str, tuple[OpShardingArgs, int]],
) -> Grouping | None:
    """Return the groups of rows of a stage, None if rows are not split.

    Args:
        world: The devices of this rank.
        inputs: What the stage takes.
        outputs: What it makes.
        parameters: Role → how a parameter is sharded where it is used, and the number
            of its dimensions. Those that are split over the batch axis have no sums per
            group: their gradient is split from the start.
    """
    if world.layout.num_row_groups == 1:
        return None
    dims: dict[str, int] = {}
    for name, specs in (("input", inputs), ("tangent", outputs)):
        for index, spec in enumerate(specs):
            dim = world.layout.batch_dim(spec.partition)
            dims |= {} if dim is None else {f"{name}:{index}": dim}
    sums = {
        role: world.stacked(layout, num_dims)
        for role, (layout, num_dims) in parameters.items()
    }
    return Grouping(
        RowGroups(world.layout.num_row_groups, world.rows_sharding),
        dims,
        {role: sharding for role, sharding in sums.items() if sharding is not None},
    )
