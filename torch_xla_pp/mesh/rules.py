"""Sharding rules: parameter name patterns and the partitions they ask for."""

from collections.abc import Mapping

from torch_xla_pp.mesh.axis_rules import AxisRules, first_match
from torch_xla_pp.mesh.local_mesh import LocalMesh, Partition

Sharding = AxisRules | Mapping[str, Partition]


def assign_partitions(
    sharding: Sharding,
    shapes: Mapping[str, tuple[int, ...]],
    mesh: LocalMesh,
    *,
    whole_model: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Partition]:
    """Assign a partition to each tensor whose name matches a rule or a pattern.

    Args:
        sharding: Axis rules, or a table for `match_rules`.
        shapes: Name → shape of the parameters and buffers of one stage.
        mesh: The devices of the rank.
        whole_model: Name → shape for all stages, None if not known. Axis rules must
            then fit all of them, and each pattern must match one.

    Returns:
        Name → partition.

    Raises:
        ValueError: A rule does not fit; all faults are listed, one a line.
    """
    if not isinstance(sharding, AxisRules):
        return match_rules(sharding, shapes, mesh)
    everything = shapes if whole_model is None else {**whole_model, **shapes}
    partitions = sharding.resolve(everything, mesh, whole_model=whole_model)
    return {name: p for name, p in partitions.items() if name in shapes}


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
        pattern = first_match(rules, name)
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
