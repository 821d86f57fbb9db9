"""Sharding rules: parameter name patterns and the partitions they ask for."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch_xla_pp.mesh.local_mesh import LocalMesh, Partition


def match_rules(
    rules: Mapping[str, Partition],
    shapes: Mapping[str, tuple[int, ...]],
    mesh: LocalMesh,
) -> dict[str, Partition]:
    """Assign a partition to each tensor whose name matches a rule.

    Args:
        rules: Glob pattern on a fully qualified name → partition; the first rule
            that matches a name counts. A pattern may match nothing, since the
            same rules are given to every stage of a model.
        shapes: Name → shape of the parameters and buffers of one stage.
        mesh: The devices of the rank.

    Returns:
        Name → partition, for the names that a rule matches.

    Raises:
        ValueError: A partition does not fit; all faults are listed, one a line.
    """
    matched: dict[str, Partition] = {}
    found = []
    for name, shape in shapes.items():
        pattern = next((p for p in rules if fnmatchcase(name, p)), None)
        if pattern is None:
            continue
        partition = tuple(rules[pattern])
        matched[name] = partition
        found += [
            f"{name} {list(shape)}: rule {pattern!r} gives {partition}: {fault}"
            for fault in mesh.faults(shape, partition)
        ]
    if found:
        raise ValueError(
            "sharding: rules that do not fit the parameters. Correct these:\n  "
            + "\n  ".join(found)
        )
    return matched
