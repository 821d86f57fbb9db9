"""Operations of a graph that repeat, layer by layer."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, fx
from torch.utils import _pytree as pytree


class IrregularError(Exception):
    """Something does not repeat."""


class LayerValue(NamedTuple):
    """A parameter or a buffer of one of several layers.

    Attributes:
        name: Its name in the layer.
        layer: Which of the layers has it.
    """

    name: str
    layer: int


def held_by_layers(names: Iterable[str]) -> dict[str, LayerValue]:
    """Find the longest list of modules, by names of parameters and buffers.

    Args:
        names: The names in a module.

    Returns:
        Those of the list, empty if there is none.
    """
    lists: dict[str, dict[str, LayerValue]] = defaultdict(dict)
    for name in names:
        parts = name.split(".")
        for place, part in enumerate(parts):
            if part.isdigit():
                path, own = ".".join(parts[:place]), ".".join(parts[place + 1 :])
                lists[path][name] = LayerValue(own, int(part))
    return max(lists.values(), key=_num_layers, default={})


def in_groups(held: Mapping[str, LayerValue], size: int) -> dict[str, LayerValue]:
    """Take so many layers for one.

    Args:
        held: What layers hold, by name.
        size: The number of layers of a group.
    """
    first = min(x.layer for x in held.values())
    found = {}
    for name, (own, layer) in held.items():
        group, member = divmod(layer - first, size)
        found[name] = LayerValue(f"{member}.{own}", group)
    return found


def _num_layers(held: Mapping[str, LayerValue]) -> int:
    return len({x.layer for x in held.values()})


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRun:
    """Consecutive operations that repeat.

    Args:
        start: The first operation's place in the graph.
        period: How many operations there are for each layer.
        count: How many layers there are.
    """

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """Return the place behind the last operation."""
        return self.start + self.period * self.count

    def layer_of(self, place: int) -> int:
        """Return the layer of a place; those before and behind count on."""
        return (place - self.start) // self.period

    def place_in(self, place: int, layer: int) -> int:
        """Return where another layer has the same operation."""
        return place + (layer - self.layer_of(place)) * self.period


Reads = Callable[[fx.Node, fx.Node], bool]
"""Takes what an operation reads, and what else the one a period later reads in its
place; returns whether that repeats."""


def find_run(
    ops: Sequence[fx.Node], period: int, near: int, repeats: Reads
) -> LayerRun | None:
    """Return the longest run around a place, None if nothing repeats there.

    Args:
        ops: The operations.
        period: How many operations a layer has.
        near: A place in the run.
        repeats: Compares what operations read.
    """

    def is_equal(place: int) -> bool:
        is_there = 0 <= place and place + period < len(ops)
        return is_there and _are_equal(ops[place], ops[place + period], repeats)

    if period <= 0 or not is_equal(near):
        return None
    start, end = near, near + 1
    while is_equal(start - 1):
        start -= 1
    while is_equal(end):
        end += 1
    return LayerRun(start=start, period=period, count=(end - start) // period + 1)


def _are_equal(first: fx.Node, second: fx.Node, repeats: Reads) -> bool:
    if first.target is not second.target or _look(first) != _look(second):
        return False
    if _constants(first) != _constants(second):
        return False
    return all(
        one is other or repeats(one, other)
        for one, other in zip(reads_of(first), reads_of(second), strict=True)
    )


def reads_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among the arguments of a node, in order."""
    found: list[fx.Node] = []

    def note(read: fx.Node) -> fx.Node:
        found.append(read)
        return read

    fx.map_arg((node.args, node.kwargs), note)
    return found


def copy_reading(graph: fx.Graph, node: fx.Node, reads: Iterable[fx.Node]) -> fx.Node:
    """Copy a node that reads others, given in the order of `reads_of`."""
    given = iter(reads)
    return graph.node_copy(node, lambda _: next(given))


def replace_reads(node: fx.Node, reads: Iterable[fx.Node]) -> None:
    """Let a node read others, likewise."""
    given = iter(reads)
    found: Any = fx.map_arg((node.args, node.kwargs), lambda _: next(given))
    node.args, node.kwargs = found


def _constants(node: fx.Node) -> str:
    """Return all arguments but nodes; 1, 1.0 and True are three."""
    found: Any = fx.map_arg((node.args, node.kwargs), lambda _: "a node")
    return repr(found)


def _look(node: fx.Node) -> list[Any]:
    """Return what a node's value looks like, and the line that it comes from."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return [
        node.meta.get("stack_trace"),
        node.meta.get("recompute"),
        *((x.shape, x.dtype, x.stride()) for x in values if isinstance(x, Tensor)),
        *(x for x in values if not isinstance(x, Tensor)),
    ]


def usual_step(places: Sequence[int]) -> tuple[int, int]:
    """Return a place amid those from which the most usual step leads on, and the step.

    Args:
        places: Places in a graph; 0 and 0 are returned if there are fewer than two.
    """
    steps = [b - a for a, b in itertools.pairwise(places)]
    if not steps:
        return 0, 0
    step = Counter(steps).most_common(1)[0][0]
    from_here = [
        place for place, own in zip(places, steps, strict=False) if own == step
    ]
    return from_here[len(from_here) // 2], step
