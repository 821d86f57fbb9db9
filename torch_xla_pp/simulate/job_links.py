"""The links of a job whose axes over ranks are not equally fast.

Terms: an axis is *fast* or *slow* by the link between two ranks that differ along it,
such as chips' own links within a slice and the data center's network between slices.
Ranks are numbered row by row, as torchrun and `init_device_mesh` do: the last axis
first, so that ranks of one host differ along the last axes.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch_xla_pp.simulate.network import Link, Network


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisLink:
    """An axis over ranks, and the link between neighbours along it.

    Args:
        name: Such as "pp" or "dp".
        size: How many ranks there are along it.
        link: The link.

    Raises:
        ValueError: There are no ranks along it.
    """

    name: str
    size: int
    link: Link

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(
                f"axis {self.name}: expected at least 1 rank, got {self.size}. Correct "
                "it."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLinks:
    """The axes over the ranks of a job, those with the slowest links first.

    Args:
        axes: The axes, in the order of the job's mesh.

    Raises:
        ValueError: An axis is named twice.

    Example:
        >>> slow, fast = Link(bytes_per_s=3e9), Link(bytes_per_s=9e10)
        >>> dp, pp = ("dp", 2, slow), ("pp", 4, fast)
        >>> job = JobLinks.of(dp, pp)
        >>> job.network().link(0, 4) is slow, job.network().link(0, 1) is fast
        (True, True)
    """

    axes: tuple[AxisLink, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) < len(names):
            raise ValueError(
                f"job's links: expected different axes, got {', '.join(names)}. Rename "
                "one."
            )

    @classmethod
    def of(cls, *axes: tuple[str, int, Link]) -> "JobLinks":
        """Return the links of axes with their names and sizes."""
        return cls(
            axes=tuple(AxisLink(name=n, size=size, link=link) for n, size, link in axes)
        )

    def along(self, name: str) -> AxisLink:
        """Return an axis.

        Raises:
            ValueError: There is no such axis.
        """
        for axis in self.axes:
            if axis.name == name:
                return axis
        names = ", ".join(axis.name for axis in self.axes)
        raise ValueError(
            f"job's links: expected one of the axes {names}, got {name!r}. Name one."
        )

    def network(self) -> Network:
        """Return the links between all ranks: of the first axis where they differ."""
        places = [*itertools.product(*(range(axis.size) for axis in self.axes))]
        links = {}
        for (a, mine), (b, theirs) in itertools.permutations(enumerate(places), 2):
            differing = (
                axis.link
                for axis, i, j in zip(self.axes, mine, theirs, strict=True)
                if i != j
            )
            links[a, b] = next(differing)
        return Network(links=links)

    def all_reduce_s(self, num_bytes: float, names: Sequence[str]) -> float:
        """Return the time of a sum over all ranks along some axes.

        Each rank gets a part of the sum along the last axis, the parts are summed along
        the others, and gathered along the last one again: the slowest links carry only
        the part of a rank.

        Source: MaxText's guide to sharding, hierarchical data parallelism.

        Args:
            num_bytes: Bytes of the value, on each rank.
            names: The axes.
        """
        wanted = [self.along(name) for name in names]
        order = [axis for axis in self.axes if axis in wanted]
        return sum(_rounds_s(order, num_bytes))


def _rounds_s(axes: Sequence[AxisLink], num_bytes: float) -> Iterator[float]:
    """Yield the times of the sums along each axis, the last axis first."""
    for axis in reversed(axes):
        yield ring_all_reduce_s(num_bytes, axis.size, axis.link)
        num_bytes /= axis.size


def ring_all_reduce_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the time of a sum over a ring of ranks.

    In each of 2 (n - 1) rounds every rank sends an n-th of the value to the next one.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", JPDC 2009.

    Args:
        num_bytes: Bytes of the value.
        num_ranks: Number of ranks.
        link: The link from each rank to the next.
    """
    if num_ranks < 2:
        return 0.0
    part = num_bytes / num_ranks / link.bytes_per_s
    return 2 * (num_ranks - 1) * (link.latency_s + part)
