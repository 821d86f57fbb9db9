"""The axes of a job's mesh that stay within a host.

Links within a host are faster than those between hosts. Axes with little communication,
such as replicas, whose gradients are summed once a step, may be slow; the others should
be fast.
"""

import itertools
from collections.abc import Sequence

from torch_xla_pp.mesh.job_axes import MeshLayout


def host_faults(
    layout: MeshLayout, slow: Sequence[str], hosts: Sequence[str]
) -> list[str]:
    """List the fast axes that leave a host.

    Args:
        layout: The axes of the job, whose ranks are numbered row by row.
        slow: Process axes that may leave a host; all others must not.
        hosts: Name of each rank's host.
    """
    unknown = [name for name in slow if name not in layout.process_names]
    if unknown:
        names = ", ".join(layout.process_names)
        return [f"slow: expected process axes, {names}, got {', '.join(unknown)}"]
    first: dict[tuple[int, ...], int] = {}
    found = []
    places = itertools.product(*map(range, layout.process_shape))
    for rank, place in enumerate(places):
        outer = zip(layout.process_names, place, strict=True)
        group = tuple(i for name, i in outer if name in slow)
        other = first.setdefault(group, rank)
        if hosts[other] != hosts[rank]:
            fast = [name for name in layout.process_names if name not in slow]
            found.append(
                f"fast axes {', '.join(fast)}: expected ranks {other} and {rank} on "
                f"one host, got {hosts[other]} and {hosts[rank]}"
            )
    return found
