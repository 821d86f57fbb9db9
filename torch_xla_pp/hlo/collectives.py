"""The collectives in the HLO text of a compiled program.

Each device runs the program; a collective is one of its instructions in which devices
exchange values. Its *groups* are the devices that exchange with each other. Where
these are the devices along some axes of the rank's mesh, the axes are given.

An instruction in the body of a loop is counted once, however often it runs.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch_xla_pp.hlo.sharding import device_ids
from torch_xla_pp.mesh import LocalMesh

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# "-start" stands for the pair of an asynchronous collective.
_INSTRUCTION = re.compile(
    rf"= (?P<result>\(.*?\)|\S+) (?P<kind>{'|'.join(_KINDS)})(?:-start)?\("
)
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_IOTA = re.compile(
    r"replica_groups=\[(?P<shape>[\d,]+)\]<=\[(?P<iota>[\d,]+)\]"
    r"(?:T\((?P<order>[\d,]+)\))?"
)
_SHAPE = re.compile(r"\b[a-z]+(\d*)\w*\[([\d,]*)\]")
_BITS_OF_A_BYTE = 8
_BITS_OF_PRED = 8

DeviceGroups = frozenset[frozenset[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """The collectives of one kind in a program.

    Args:
        kind: Its name in HLO, e.g. `all-gather`.
        axes: Mesh axes along which devices exchange, None for other groups.
        count: How many instructions there are.
        num_bytes: Bytes of their results, on one device.
    """

    kind: str
    axes: tuple[str, ...] | None
    count: int
    num_bytes: int

    def __str__(self) -> str:
        axes = "other groups" if self.axes is None else ", ".join(self.axes)
        return f"{self.count} {self.kind} over {axes}: {self.num_bytes} bytes"


def collectives_of(hlo: str, mesh: LocalMesh) -> tuple[Collective, ...]:
    """Count the collectives of a partitioned program.

    Args:
        hlo: Text of the program after partitioning.
        mesh: The devices that it runs on, with ids in the order of the mesh.
    """
    known = _groups_of_axes(mesh)
    counts: Counter[tuple[str, tuple[str, ...] | None]] = Counter()
    sizes: Counter[tuple[str, tuple[str, ...] | None]] = Counter()
    for line in hlo.splitlines():
        match = _INSTRUCTION.search(line)
        if match is None:
            continue
        key = (match["kind"], known.get(_groups(line, mesh.num_devices)))
        counts[key] += 1
        sizes[key] += _num_bytes(match["result"])
    return tuple(
        Collective(kind=kind, axes=axes, count=count, num_bytes=sizes[kind, axes])
        for (kind, axes), count in sorted(counts.items(), key=str)
    )


def axes_of_groups(
    groups: Iterable[Iterable[int]], mesh: LocalMesh
) -> tuple[str, ...] | None:
    """Return the axes along which devices exchange, None if these are no such groups.

    Args:
        groups: Devices that exchange with each other; or pairs of senders and
            receivers.
        mesh: The devices.
    """
    joined = _joined(list(group) for group in groups)
    # A device that is in no group does not take part.
    return _groups_of_axes(mesh).get(joined) if joined else None


def _groups_of_axes(mesh: LocalMesh) -> dict[DeviceGroups, tuple[str, ...]]:
    """Return the groups of devices along each set of axes, fewest axes first."""
    found: dict[DeviceGroups, tuple[str, ...]] = {}
    places = list(itertools.product(*map(range, mesh.shape)))
    for count in range(len(mesh.names) + 1):
        for axes in itertools.combinations(range(len(mesh.names)), count):
            groups: dict[tuple[int, ...], set[int]] = {}
            for device, place in enumerate(places):
                rest = tuple(k for i, k in enumerate(place) if i not in axes)
                groups.setdefault(rest, set()).add(device)
            names = tuple(mesh.names[i] for i in axes)
            found.setdefault(frozenset(map(frozenset, groups.values())), names)
    return found


def _groups(line: str, num_devices: int) -> DeviceGroups:
    """Return the groups of devices that exchange with each other."""
    iota = _IOTA.search(line)
    if iota is not None:
        shape = [int(n) for n in iota["shape"].split(",")]
        ids = device_ids(iota["iota"], iota["order"])
        size = shape[-1]
        parts = [ids[i : i + size] for i in range(0, len(ids), size)]
        return frozenset(map(frozenset, parts))
    listed = _LISTED.search(line)
    if listed is None:
        return frozenset([frozenset(range(num_devices))])
    texts = re.findall(r"\{([\d, ]*)\}", listed[1])
    return _joined([int(n) for n in text.split(",")] for text in texts if text)


def _joined(parts: Iterator[list[int]]) -> DeviceGroups:
    """Join the parts that share devices, as pairs of senders and receivers do."""
    groups: list[set[int]] = []
    for part in parts:
        touched = [group for group in groups if not group.isdisjoint(part)]
        groups = [group for group in groups if group not in touched]
        groups.append(set(part).union(*touched))
    return frozenset(map(frozenset, groups))


def _num_bytes(result: str) -> int:
    """Return the bytes of a shape or a tuple of shapes."""
    return sum(
        math.prod(int(size) for size in sizes.split(",") if size) * _width(bits)
        for bits, sizes in _SHAPE.findall(result)
    )


def _width(bits: str) -> int:
    return max(1, int(bits or _BITS_OF_PRED) // _BITS_OF_A_BYTE)
