"""How long exchanges between the chips of a slice take, by published link speeds.

The chips that exchange are assumed to form a box of the slice's mesh. In each dimension
in which the box is wider than one chip they have one link, or two where the dimension
wraps around and the box has all of it. With links of `W` bytes/s, `n` chips and a
buffer of `V` bytes when it is whole:

    all-gather, reduce-scatter     (n - 1) / n * V / (number of links * W)
    all-reduce                     twice as long
    all-to-all                     what crosses the middle of the box: in a dimension
                                   of e chips e / 4 * V / (its links * W), where V is
                                   one chip's buffer; the largest counts
    collective-permute             what the busiest link carries, if every message goes
                                   along one dimension after the other

and `HOP_S` for each chip on the longest way. Where several groups are in one box, they
share its links. Other traffic on the links at that time is not known, and not counted.

Source: the chapter on collectives of https://jax-ml.github.io/scaling-book/sharding/,
which compares one such time with a profile: 560 us for 680 us. The bound of an
all-to-all is that of the bisection, as there.
"""

import math
from collections import Counter
from collections.abc import Sequence

from torch_xla_pp.accelerators.chips import HOP_S
from torch_xla_pp.accelerators.compiled_program import DeviceCollective
from torch_xla_pp.accelerators.topologies import Slice

_Place = tuple[int, ...]


def exchange_s(collective: DeviceCollective, topology: Slice) -> float:
    """Return the seconds that an exchange takes, once.

    Args:
        collective: The exchange; without groups, one of all chips.
        topology: The chips; the first dimension's neighbours have numbers that follow
            each other.
    """
    groups = collective.groups or (tuple(range(topology.num_devices)),)
    if collective.kind == "collective-permute":
        return _permute_s(groups, collective.num_bytes, topology)
    return max(_group_s(group, collective, topology) for group in groups)


def _group_s(
    group: Sequence[int], collective: DeviceCollective, topology: Slice
) -> float:
    count, num_bytes = len(group), collective.num_bytes
    if count == 1:
        return 0.0
    box = _box(group, topology)
    links = [_links(size, dim, topology) for dim, size in enumerate(box)]
    hops = sum((size - 1) / (link or 1) for size, link in zip(box, links, strict=True))
    # Interleaved groups share the links.
    speed = topology.chip.link_bytes_per_s * count / math.prod(box)
    latency_s = math.ceil(hops) * HOP_S
    if collective.kind in ("all-to-all", "ragged-all-to-all"):
        pairs = zip(box, links, strict=True)
        crossing = max(size / (4 * link) for size, link in pairs if link)
        return crossing * num_bytes / speed + latency_s
    if collective.kind == "reduce-scatter":
        num_bytes *= count
    gather_s = (count - 1) / count * num_bytes / (sum(links) * speed) + latency_s
    return gather_s * (2 if collective.kind == "all-reduce" else 1)


def _permute_s(
    pairs: Sequence[Sequence[int]], num_bytes: int, topology: Slice
) -> float:
    """Return the seconds that messages take if all begin at once."""
    used: Counter[tuple[_Place, _Place]] = Counter()
    hops = 0
    for sender, receiver in pairs:
        way = _way(_place(sender, topology), _place(receiver, topology), topology)
        used.update(zip(way, way[1:], strict=False))
        hops = max(hops, len(way) - 1)
    busiest = max(used.values(), default=0)
    speed = topology.chip.link_bytes_per_s
    return busiest * num_bytes / speed + hops * HOP_S


def _way(start: _Place, end: _Place, topology: Slice) -> list[_Place]:
    """Return the chips that a message passes, dimension after dimension."""
    found = [start]
    for dim, size in enumerate(topology.shape):
        ahead = (end[dim] - start[dim]) % size
        step = 1 if end[dim] > start[dim] else -1
        count = abs(end[dim] - start[dim])
        if _wraps(dim, topology):
            step, count = (1, ahead) if 2 * ahead <= size else (-1, size - ahead)
        for _ in range(count):
            place = [*found[-1]]
            place[dim] = (place[dim] + step) % size
            found.append(tuple(place))
    return found


def _box(group: Sequence[int], topology: Slice) -> list[int]:
    """Return the sizes of the smallest box with a group."""
    places = [_place(number, topology) for number in group]
    return [max(along) - min(along) + 1 for along in zip(*places, strict=True)]


def _links(size: int, dim: int, topology: Slice) -> int:
    """Return how many links a chip has in a dimension of a box."""
    if size == 1:
        return 0
    return 2 if size == topology.shape[dim] and _wraps(dim, topology) else 1


def _wraps(dim: int, topology: Slice) -> bool:
    return topology.shape[dim] % topology.chip.wraps_at == 0


def _place(number: int, topology: Slice) -> _Place:
    found = []
    for size in topology.shape:
        found.append(number % size)
        number //= size
    return tuple(found)
