"""Repeat layers in the joint graph of a stage that was traced without them.

Forward and backward are a run each. What an operation of a layer reads is, in every
layer, as many layers away: so it is known for each of those that are put in, and for
those that are there already what they read instead.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from torch import fx

from torch_xla_pp.compile.equal_layers.numbered import HeldNumbers, NumberedLayers
from torch_xla_pp.compile.equal_layers.runs import (
    IrregularError,
    copy_reading,
    find_run,
    reads_of,
    replace_reads,
    usual_step,
)
from torch_xla_pp.compile.equal_layers.shorten import LAST_FIRST, Shortened
from torch_xla_pp.compile.joint_graph import JointGraph
from torch_xla_pp.compile.names import is_buffer, is_parameter, name_in_module

_FEWEST = LAST_FIRST + 2


def lengthen(joint: JointGraph, shortened: Shortened) -> bool:
    """Put the layers that were left out into a joint graph.

    Args:
        joint: The graph of the forward without them.
        shortened: That forward.

    Returns:
        Whether it could be done; the graph is as it was if not.
    """
    try:
        lengthening = _Lengthening(joint, shortened)
    except IrregularError:
        return False
    lengthening.change()
    return True


class _Read(NamedTuple):
    """What an operation of a run reads, in any layer.

    Attributes:
        distance: How many layers further on it is.
        name: Its name in the layer, if it is a parameter or a buffer.
        layers: The run that makes it, if it is made.
        place: Where a layer makes it.
    """

    distance: int
    name: str = ""
    layers: NumberedLayers | None = None
    place: int = 0


_Reads = Sequence[_Read | None]
"""In the order of `reads_of`; None for what all layers read."""


class _Grad(NamedTuple):
    """The gradient of a layer's parameter.

    Attributes:
        place: Where it is made, or where the first layer of the run makes its own.
        layers: The run that makes it, None if it is outside of it.
        number: The number of the layer that does.
    """

    place: int
    layers: NumberedLayers | None = None
    number: int = 0


class _Lengthening:
    """The change of a joint graph.

    Args:
        joint: The graph.
        shortened: The forward that was traced.

    Raises:
        IrregularError: It cannot be done.
    """

    def __init__(self, joint: JointGraph, shortened: Shortened) -> None:
        self._joint, self._num_new = joint, shortened.num_left_out
        self._ops = [x for x in joint.graph.graph.nodes if x.op == "call_function"]
        self._places = {op: place for place, op in enumerate(self._ops)}
        tags = [op.meta.get("partitioner_tag") == "is_backward" for op in self._ops]
        self._num_forward = tags.index(True) if True in tags else len(tags)
        held = {
            node: shortened.held[name_in_module(role)]
            for node, role in joint.roles.items()
            if (is_parameter(role) or is_buffer(role))
            and name_in_module(role) in shortened.held
        }
        self._held = HeldNumbers(held, self._num_new)
        self._forward = self._find_forward()
        self._backward = self._find_backward()
        found = (self._forward, self._backward)
        self._runs = [layers for layers in found if layers is not None]
        self._reads: dict[fx.Node, _Reads] = {
            self._ops[place]: self._reads_at(layers, place)
            for layers in self._runs
            for place in layers.places
        }
        self._check_new_reads()
        self._check_others()
        self._grads = self._find_grads()
        self._regions = sorted(set(joint.regions.values()))
        self._region_step = self._find_region_step()

    def change(self) -> None:
        """Change the graph."""
        graph, joint = self._joint.graph.graph, self._joint
        regions = {op: self._regions.index(x) for op, x in joint.regions.items()}
        joint.regions = {op: self._moved_region(op, x) for op, x in regions.items()}
        for layers in self._runs:
            with graph.inserting_before(layers.behind_new):
                for number in layers.new_numbers:
                    for place in layers.template:
                        op = self._ops[place]
                        copy = copy_reading(graph, op, self._resolved(op, number))
                        layers.add(place, number, copy)
                        if op in joint.selected:
                            joint.selected.add(copy)
                        if op in regions:
                            region = self._moved_region(op, regions[op], number)
                            joint.regions[copy] = region
        for layers in self._runs:
            for place in layers.places:
                op = self._ops[place]
                reads = self._resolved(op, layers.number_of(place))
                if reads != reads_of(op):
                    replace_reads(op, reads)
        grads = dict(joint.parameter_grads)
        for node, (place, source, number) in self._grads.items():
            made = self._ops[place] if source is None else source.node(place, number)
            grads[joint.roles[node]] = made
        joint.parameter_grads = {
            role: grads[role] for role in joint.roles.values() if role in grads
        }
        joint.graph.recompile()

    def _find_forward(self) -> NumberedLayers:
        """Find the layers of the forward."""
        ops = self._ops[: self._num_forward]

        def first_user(node: fx.Node) -> list[int]:
            places = self._users(node)
            return [min(places)] if places and min(places) < len(ops) else []

        def repeats(period: int, one: fx.Node, other: fx.Node) -> bool:
            if self._are_made(one, other):
                return self._places[other] - self._places[one] == period
            return self._is_held_next(one, other)

        found = self._find_run(ops, first_user, repeats, is_reversed=False)
        if found is None:
            raise IrregularError
        return found

    def _find_backward(self) -> NumberedLayers | None:
        """Find the layers of the backward, None if it has none."""
        layers, start = self._forward, self._num_forward

        def last_user(node: fx.Node) -> list[int]:
            grad = self._joint.parameter_grads.get(self._joint.roles[node])
            made = [] if grad is None else [self._places.get(grad, -1)]
            places = [x for x in (*self._users(node), *made) if x >= start]
            return [max(places)] if places else []

        def repeats(period: int, one: fx.Node, other: fx.Node) -> bool:
            if not self._are_made(one, other):
                return self._is_held_next(other, one)
            places = self._places[one], self._places[other]
            step = places[1] - places[0]
            if min(places) >= start:
                return step == period
            return max(places) < start and step == -layers.period

        return self._find_run(self._ops, last_user, repeats, is_reversed=True)

    def _find_run(
        self,
        ops: Sequence[fx.Node],
        place_of: Callable[[fx.Node], list[int]],
        repeats: Callable[[int, fx.Node, fx.Node], bool],
        *,
        is_reversed: bool,
    ) -> NumberedLayers | None:
        """Return the layers around what reads the parameters of some name.

        Args:
            ops: The operations in question.
            place_of: Takes a parameter of a layer; returns a place in the layer, none
                if there is none.
            repeats: Takes a period; and two nodes, as for `find_run`.
            is_reversed: Whether the last layer comes first.

        Raises:
            IrregularError: Layers are there, but do not repeat.
        """
        for name in self._held.names:
            places = [x for node in self._held.used(name) for x in place_of(node)]
            if len(places) <= _FEWEST:
                continue
            if is_reversed:
                places.reverse()
            near, period = usual_step(places)
            run = find_run(ops, period, near, partial(repeats, period))
            if run is None or run.count < _FEWEST:
                raise IrregularError
            return NumberedLayers(
                self._ops, run, self._num_new, is_reversed=is_reversed
            )
        return None

    def _users(self, node: fx.Node) -> list[int]:
        return [self._places[x] for x in node.users if x in self._places]

    def _are_made(self, *nodes: fx.Node) -> bool:
        return all(node in self._places for node in nodes)

    def _is_held_next(self, one: fx.Node, other: fx.Node) -> bool:
        """Return whether a layer holds what the one before it holds as `one`."""
        index, following = self._held.index_of(one), self._held.index_of(other)
        if index is None or following is None:
            return False
        names = {self._held.held[node].name for node in (one, other)}
        return len(names) == 1 and following == index + 1

    def _reads_at(self, layers: NumberedLayers, place: int) -> _Reads:
        """Find out what an operation of a run reads."""
        index = layers.index_of(place)

        def described(read: fx.Node, beside: fx.Node) -> _Read | None:
            if read is beside:
                return None
            held = self._held.index_of(read)
            if held is not None:
                return _Read(held - index, name=self._held.held[read].name)
            made = self._places[read]
            source = self._forward if made < self._num_forward else layers
            return _Read(source.index_of(made) - index, layers=source, place=made)

        reads = reads_of(self._ops[place])
        return list(map(described, reads, reads_of(self._ops[layers.beside(place)])))

    def _resolved(self, op: fx.Node, number: int) -> list[fx.Node]:
        """Return what an operation reads in a layer."""
        return [
            read if known is None else self._node(known, number)
            for read, known in zip(reads_of(op), self._reads[op], strict=True)
        ]

    def _node(self, read: _Read, number: int) -> fx.Node:
        number += read.distance
        if read.layers is None:
            return self._held.node(read.name, number)
        return read.layers.node(read.place, number)

    def _check_new_reads(self) -> None:
        """Refuse operations that read what is not there."""
        for layers in self._runs:
            for place in layers.places:
                numbers = [layers.number_of(place)]
                if place in layers.template:
                    numbers += layers.new_numbers
                for read in filter(None, self._reads[self._ops[place]]):
                    for number in numbers:
                        self._check(read, number + read.distance)

    def _check(self, read: _Read, number: int) -> None:
        if read.layers is None:
            self._held.node(read.name, number)
        else:
            read.layers.check(read.place, number)

    def _check_others(self) -> None:
        """Refuse what is no layer's and reads a layer that moves away from it.

        What comes between forward and backward belongs to the last layers, all else to
        the first ones.
        """
        joint = self._joint
        for place, op in enumerate(self._ops):
            if op not in self._reads:
                self._check_side(reads_of(op), is_last=self._is_between(place))
        self._check_side(joint.outputs, is_last=True)
        self._check_side(filter(None, joint.input_grads.values()), is_last=False)
        of_others = [
            grad
            for node, role in joint.roles.items()
            if self._held.index_of(node) is None
            and (grad := joint.parameter_grads.get(role)) is not None
        ]
        self._check_side([x for x in of_others if x in self._reads], is_last=False)
        updated = [n for n, role in joint.roles.items() if role in joint.buffer_updates]
        is_layers = any(self._held.index_of(node) is not None for node in updated)
        if is_layers or any(x in self._reads for x in joint.buffer_updates.values()):
            raise IrregularError

    def _is_between(self, place: int) -> bool:
        end = len(self._ops) if self._backward is None else self._backward.places.start
        return self._forward.places.stop <= place < end

    def _check_side(self, reads: Iterable[fx.Node], *, is_last: bool) -> None:
        """Refuse values of the first layers, or of the last ones."""
        for read in reads:
            held = self._held.index_of(read)
            if held is not None:
                moved = self._held.number_of(read) - held
                is_wrong = moved != (self._num_new if is_last else 0)
            else:
                found = self._layers_at(self._places.get(read, -1))
                is_behind = (
                    found is not None
                    and found.index_of(self._places[read]) > LAST_FIRST
                )
                is_wrong = found is not None and is_behind != is_last
            if is_wrong:
                raise IrregularError

    def _layers_at(self, place: int) -> NumberedLayers | None:
        return next((x for x in self._runs if place in x.places), None)

    def _find_grads(self) -> dict[fx.Node, _Grad]:
        """Find the gradients of what all layers hold."""
        found: dict[fx.Node, _Grad] = {}
        for name in self._held.names:
            for node in self._held.used(name):
                grad = self._joint.parameter_grads.get(self._joint.roles[node])
                alike = {} if grad is None else self._grads_like(node, grad)
                if any(found.setdefault(x, new) != new for x, new in alike.items()):
                    raise IrregularError
            if len({node in found for node in self._held.all(name)}) > 1:
                raise IrregularError
        return found

    def _grads_like(self, node: fx.Node, grad: fx.Node) -> dict[fx.Node, _Grad]:
        """Return the gradients of all layers that are made as one of them."""
        place, index = self._places.get(grad, -1), self._held.index_of(node)
        layers = self._layers_at(place)
        if index is None or place < self._num_forward:
            raise IrregularError
        if layers is None:
            self._check_side([node], is_last=self._is_between(place))
            return {node: _Grad(place)}
        distance = index - layers.index_of(place)
        name, first = self._held.held[node].name, layers.check(place, 0)
        return {
            self._held.node(name, number + distance): _Grad(first, layers, number)
            for number in layers.numbers
        }

    def _find_region_step(self) -> int:
        """Return how many regions of checkpoints each layer has."""
        steps = set()
        for layers in self._runs:
            for place in layers.places:
                beside = layers.beside(place)
                own, other = (self._region(self._ops[x]) for x in (place, beside))
                if own is not None and other is not None:
                    is_next = layers.index_of(beside) > layers.index_of(place)
                    steps.add(other - own if is_next else own - other)
                elif own is not other:
                    raise IrregularError
        if len(steps) > 1:
            raise IrregularError
        return steps.pop() if steps else 0

    def _region(self, op: fx.Node) -> int | None:
        """Return the place of an operation's region among all regions."""
        region = self._joint.regions.get(op)
        return None if region is None else self._regions.index(region)

    def _moved_region(self, op: fx.Node, region: int, number: int | None = None) -> int:
        """Return the region of an operation, or of its copy, counted anew.

        Args:
            op: The operation.
            region: The place of its region among those that are there.
            number: The layer, its own if not given.
        """
        place = self._places.get(op, -1)
        layers = self._layers_at(place)
        if layers is not None:
            own = layers.number_of(place) if number is None else number
            return region + self._region_step * (own - layers.index_of(place))
        is_behind = place >= 0 and self._is_between(place)
        return region + self._region_step * self._num_new * is_behind
