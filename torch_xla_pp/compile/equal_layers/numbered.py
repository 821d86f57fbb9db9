"""Layers of a joint graph, and what is held under their names, numbered anew.

A number is that of a layer in the whole graph: those behind the first ones count on by
the number of layers that are put in.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import fx

from torch_xla_pp.compile.equal_layers.runs import IrregularError, LayerRun, LayerValue
from torch_xla_pp.compile.equal_layers.shorten import LAST_FIRST


class NumberedLayers:
    """The layers of a run.

    An *index* counts the layers that are there, in the order of the forward.

    Args:
        ops: The operations of the graph.
        run: The run.
        num_new: How many layers are put in.
        is_reversed: Whether the graph has the last layer first.

    Attributes:
        period: How many operations a layer has.
    """

    def __init__(
        self, ops: Sequence[fx.Node], run: LayerRun, num_new: int, *, is_reversed: bool
    ) -> None:
        self._ops, self._run, self._num_new = ops, run, num_new
        self._is_reversed = is_reversed
        self.period = run.period
        self._copies: dict[tuple[int, int], fx.Node] = {}

    @property
    def places(self) -> range:
        """Return the places of the run in the graph."""
        return range(self._run.start, self._run.end)

    @property
    def template(self) -> range:
        """Return the places of the layer that is copied."""
        start = self._place(self._run.start, LAST_FIRST)
        return range(start, start + self._run.period)

    @property
    def numbers(self) -> range:
        """Return the numbers of all layers."""
        return range(self._run.count + self._num_new)

    @property
    def new_numbers(self) -> list[int]:
        """Return the numbers of the new layers, in the order of the graph."""
        numbers = range(LAST_FIRST + 1, LAST_FIRST + 1 + self._num_new)
        return [*reversed(numbers)] if self._is_reversed else [*numbers]

    @property
    def behind_new(self) -> fx.Node:
        """Return the operation before which the new layers come."""
        index = LAST_FIRST if self._is_reversed else LAST_FIRST + 1
        return self._ops[self._place(self._run.start, index)]

    def index_of(self, place: int) -> int:
        """Return the index of an operation's layer; those around the run count on."""
        index = self._run.layer_of(place)
        return self._run.count - 1 - index if self._is_reversed else index

    def number_of(self, place: int) -> int:
        """Return the number of an operation's layer."""
        index = self.index_of(place)
        return index if index <= LAST_FIRST else index + self._num_new

    def beside(self, place: int) -> int:
        """Return the place of the same operation in a layer next to its own."""
        index = self.index_of(place)
        return self._place(place, index + 1 if index == 0 else index - 1)

    def node(self, place: int, number: int) -> fx.Node:
        """Return an operation of a layer.

        Args:
            place: Where another layer has it.
            number: The layer's.

        Raises:
            IrregularError: There is no such layer.
        """
        if self._is_new(number):
            return self._copies[self._place(place, LAST_FIRST), number]
        return self._ops[self.check(place, number)]

    def check(self, place: int, number: int) -> int:
        """Return where a layer that is there has an operation, likewise."""
        if self._is_new(number):
            return place
        index = number if number <= LAST_FIRST else number - self._num_new
        found = self._place(place, index)
        if not 0 <= found < len(self._ops):
            raise IrregularError
        return found

    def add(self, place: int, number: int, copy: fx.Node) -> None:
        """Add a new layer's copy of an operation of the template."""
        self._copies[place, number] = copy

    def _is_new(self, number: int) -> bool:
        return LAST_FIRST < number <= LAST_FIRST + self._num_new

    def _place(self, place: int, index: int) -> int:
        if self._is_reversed:
            index = self._run.count - 1 - index
        return self._run.place_in(place, index)


class HeldNumbers:
    """The parameters and buffers of layers, by name.

    Args:
        held: Those of all layers by their placeholders, which the graph of some layers
            has, too.
        num_new: How many layers are put in.

    Attributes:
        held: As given.

    Raises:
        IrregularError: Of a name other layers are missing than a row of so many.
    """

    def __init__(self, held: Mapping[fx.Node, LayerValue], num_new: int) -> None:
        self.held = held
        self._num_new = num_new
        self._nodes: dict[str, list[fx.Node]] = defaultdict(list)
        for node, own in sorted(held.items(), key=lambda item: item[1].layer):
            self._nodes[own.name].append(node)
        self._index: dict[fx.Node, int] = {}
        for nodes in self._nodes.values():
            self._count(nodes)

    @property
    def names(self) -> list[str]:
        """Return the names that the graph uses."""
        return list(dict.fromkeys(self.held[node].name for node in self._index))

    def index_of(self, node: fx.Node) -> int | None:
        """Return the place among those in use, None for what is not in every layer."""
        return self._index.get(node)

    def used(self, name: str) -> list[fx.Node]:
        """Return those in use, in the order of layers."""
        return [node for node in self._nodes[name] if node in self._index]

    def all(self, name: str) -> list[fx.Node]:
        """Return those of all layers."""
        return self._nodes[name]

    def number_of(self, node: fx.Node) -> int:
        """Return the number of the layer that holds it, of those that have its name."""
        return self._nodes[self.held[node].name].index(node)

    def node(self, name: str, number: int) -> fx.Node:
        """Return the one of a layer.

        Raises:
            IrregularError: The layer has none.
        """
        if not 0 <= number < len(self._nodes[name]):
            raise IrregularError
        return self._nodes[name][number]

    def _count(self, nodes: Sequence[fx.Node]) -> None:
        used = [number for number, node in enumerate(nodes) if node.users]
        if len(used) in (0, len(nodes)):
            # No layer that is missing has one.
            return
        self._index |= {nodes[number]: index for index, number in enumerate(used)}
        if {number - index for index, number in enumerate(used)} != {0, self._num_new}:
            raise IrregularError
