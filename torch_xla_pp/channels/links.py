"""A stage's channels: what it exchanges with the others, for each microbatch.

See `channels.channel` for the kinds of channels, and `plan.consumers` for which stage
sends what to which.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from torch_xla_pp.channels.channel import Channel, Edge, borders_of, returned_for
from torch_xla_pp.compile import (
    Borders,
    Forwarded,
    input_grad,
    input_role,
    output_name,
    tangent_name,
)
from torch_xla_pp.mesh import TensorSpec, Tiling
from torch_xla_pp.plan import Consumers, Tilings, Value
from torch_xla_pp.text import type_text
from torch_xla_pp.transport import Message
from torch_xla_pp.world import World


class StageValues(NamedTuple):
    """The values that a stage takes from others and makes for them.

    Attributes:
        stage: Index of the stage.
        values: The values it takes, in the order of its inputs.
        received: What they look like.
        outputs: What its outputs look like.
        consumers: How values reach their consumers, for the stage itself and each of
            its producers.
    """

    stage: int
    values: Sequence[Value]
    received: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    consumers: Mapping[int, Consumers]


class Links:
    """A stage's channels to and from other stages.

    Args:
        values: What the stage takes and makes.
        open_channel: Returns the channel of an edge.
        world: The devices of this rank.

    Attributes:
        borders: What the stage's programs exchange themselves.
        unused: Outputs that need a gradient, but that no stage uses.
        has_far_producers: Whether another rank waits for gradients of inputs.
    """

    def __init__(
        self, values: StageValues, open_channel: Callable[[Edge], Channel], world: World
    ) -> None:
        self._stage = values.stage
        self._consumers = values.consumers
        self._own = values.consumers[values.stage]
        self._tilings: Tilings = {}
        self._received = values.received
        self._world = world
        inputs = dict(zip(values.values, values.received, strict=True))
        outputs = {Value(self._stage, i): x for i, x in enumerate(values.outputs)}
        self._specs = {**inputs, **outputs}
        self._input_of = {value: index for index, value in enumerate(inputs)}
        rank_here = self._own.ranks[self._stage]

        def opened(edges: Iterable[Edge]) -> list[Channel]:
            # Values of this rank first: they are there, or never come.
            ordered = sorted(edges, key=lambda x: (x.rank != rank_here, x.peer))
            return [open_channel(edge) for edge in ordered if edge.names]

        self._inputs = opened(self._input_edges())
        self._outputs = opened(self._output_edges())
        self._output_grads = opened(self._output_grad_edges())
        self._input_grads = opened(self._input_grad_edges())
        self._of_forward = (*self._inputs, *self._outputs)
        self._of_backward = (*self._output_grads, *self._input_grads)
        self.borders = self._borders(len(outputs))
        drained = returned_for(self._input_grads)
        far = (channel.edge.rank != rank_here for channel in self._input_grads)
        self.has_far_producers = any(far)
        names = {index: input_grad(index) for index in self._input_of.values()}
        self._drained_grads = {i: name for i, name in names.items() if name in drained}
        self.unused = [
            value.slot
            for value, spec in outputs.items()
            if spec.requires_grad and not self.borders.consumers[value.slot]
        ]

    def agree(self, tilings: Tilings) -> None:
        """Receive the tilings of values on other ranks, before the first message."""
        self._tilings = tilings

    def moves(self) -> Iterator[str]:
        """Yield the values that are resharded between ranks; so are their gradients."""
        for edge in (channel.edge for channel in (*self._inputs, *self._outputs)):
            here = [layout.tiling for layout in edge.layouts]
            there = edge.tilings_there() or here
            for layout, own, far in zip(edge.layouts, here, there, strict=True):
                value = type_text(layout.shape, layout.dtype)
                if own != far and edge.is_sent:
                    yield f"{value} to stage {edge.peer}: {own} -> {far}"
                elif own != far:
                    yield f"{value} from stage {edge.peer}: {far} -> {own}"

    # For each microbatch.

    def receive_inputs(self, microbatch: int) -> dict[str, Tensor]:
        """Return the operands of a forward that its channels feed."""
        return _fed(self._of_forward, microbatch)

    def send_outputs(self, microbatch: int, result: Forwarded) -> None:
        """Send what a forward made or received, unless its program did."""
        made = {output_name(i): value for i, value in result.outputs.items()}
        values = {**result.received, **made}
        for channel in self._outputs:
            channel.drain(microbatch, values)

    def receive_grads(self, microbatch: int) -> dict[str, Tensor]:
        """Return the operands of a backward that its channels feed."""
        return _fed(self._of_backward, microbatch)

    def send_grads(self, microbatch: int, grads: Mapping[int, Tensor | None]) -> None:
        """Send the gradients of received inputs, unless the program did."""
        values = {}
        for index, name in self._drained_grads.items():
            grad = grads.get(index)
            zeros = self._world.zeros
            values[name] = zeros(self._received[index]) if grad is None else grad
        for channel in self._input_grads:
            channel.drain(microbatch, values)

    # Once.

    def _borders(self, num_outputs: int) -> Borders:
        outputs = [output_name(i) for i in range(num_outputs)]
        is_last = self._stage == len(self._own.ranks) - 1
        returned = returned_for(self._outputs)
        return Borders(
            inputs=borders_of(self._inputs),
            outputs=borders_of(self._outputs),
            tangents=borders_of(self._output_grads),
            grads=borders_of(self._input_grads),
            consumers={i: self._own.consumers_of(i) for i in range(num_outputs)},
            returned=None if is_last else returned.intersection(outputs),
            passed_on=returned.difference(outputs),
        )

    def _input_edges(self) -> Iterator[Edge]:
        me, ranks = self._stage, self._own.ranks
        for producer, users in self._consumers.items():
            message = Message("F", me, 0, producer)
            direct = users.passed(producer, me)
            others = [slot for slot in users.uses.get(me, ()) if slot not in direct]
            for slots, rank in ((direct, ranks[producer]), (others, ranks[me])):
                named = {self._name(producer, s): Value(producer, s) for s in slots}
                yield self._edge(message, producer, rank, named)

    def _output_edges(self) -> Iterator[Edge]:
        """Yield the edges of what this stage makes, or passes on within its rank."""
        for origin, users in self._consumers.items():
            for consumer in users.uses:
                slots = users.passed(self._stage, consumer)
                named = {self._name(origin, s): Value(origin, s) for s in slots}
                message = Message("F", consumer, 0, origin)
                yield self._edge(message, consumer, users.ranks[consumer], named)

    def _output_grad_edges(self) -> Iterator[Edge]:
        for consumer in self._own.uses:
            named = {
                tangent_name(x.slot, consumer, self._own.consumers_of(x.slot)): x
                for x in self._with_grad(self._stage, consumer)
            }
            message = Message("B", self._stage, 0, consumer)
            yield self._edge(message, consumer, self._own.ranks[consumer], named)

    def _input_grad_edges(self) -> Iterator[Edge]:
        for producer, users in self._consumers.items():
            values = self._with_grad(producer, self._stage)
            named = {input_grad(self._input_of[x]): x for x in values}
            message = Message("B", producer, 0, self._stage)
            yield self._edge(message, producer, users.ranks[producer], named)

    def _edge(
        self, message: Message, peer: int, rank: int, named: Mapping[str, Value]
    ) -> Edge:
        """Return an edge; `named` has the values that it carries, or gradients of."""
        values = list(named.values())
        is_near = rank == self._own.ranks[self._stage]
        return Edge(
            message=message,
            is_sent=message.stage == peer,
            peer=peer,
            rank=rank,
            names=tuple(named),
            layouts=tuple(self._world.shard_layout(self._specs[x]) for x in values),
            slots=tuple(value.slot for value in values),
            there=None if is_near else self._there(peer, values),
        )

    def _there(self, peer: int, values: Sequence[Value]) -> Callable[[], list[Tiling]]:
        """Return a function for the tilings of values on the rank of another stage."""
        agreed: Tilings | None = None
        found: list[Tiling] = []

        def tilings() -> list[Tiling]:
            nonlocal agreed, found
            if agreed is not self._tilings:
                agreed = self._tilings
                found = [agreed[peer][value] for value in values]
            return found

        return tilings

    def _name(self, producer: int, slot: int) -> str:
        if producer == self._stage:
            return output_name(slot)
        return input_role(self._input_of[Value(producer, slot)])

    def _with_grad(self, producer: int, consumer: int) -> list[Value]:
        """Return the values whose gradients a consumer sends to their producer."""
        slots = self._consumers[producer].uses.get(consumer, ())
        values = [Value(producer, slot) for slot in slots]
        return [value for value in values if self._specs[value].requires_grad]


def _fed(channels: Sequence[Channel], microbatch: int) -> dict[str, Tensor]:
    if len(channels) == 1:
        return channels[0].feed(microbatch)
    found: dict[str, Tensor] = {}
    for channel in channels:
        found |= channel.feed(microbatch)
    return found
