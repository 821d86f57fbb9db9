"""What one stage exchanges with the others, for each microbatch.

Messages to other ranks are ops of the stage's programs (in-graph transport; only their
routes are passed in here) or calls of the transport. Stages of one rank hand device
values over without a copy. See `plan.fan` for who gives what to whom.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from torch_xla_pp.compile import Borders, Forwarded, input_role, route_in, route_out
from torch_xla_pp.mesh import TensorSpec, Tiling
from torch_xla_pp.plan import Fan, Tilings, Value
from torch_xla_pp.runtime.exchange import Exchange
from torch_xla_pp.text import type_text
from torch_xla_pp.transport import Direction, Message, ShardLayout
from torch_xla_pp.world import World


class Ends(NamedTuple):
    """Hold both ends of a stage: what it takes and what it makes.

    Attributes:
        stage: Index of the stage.
        values: The values it takes, in the order of its inputs.
        received: What they look like.
        outputs: What its outputs look like.
        fans: How values reach their consumers, for the stage itself and each of its
            producers.
    """

    stage: int
    values: Sequence[Value]
    received: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    fans: Mapping[int, Fan]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Post:
    """Describe one message of each microbatch between this stage and another rank.

    Args:
        direction: What is sent.
        stage: The stage on the other side.
        rank: Its rank.
        values: The values that are concerned, or whose gradients are.
        indices: Which inputs or outputs of this stage they are.
        layouts: How they lie on this rank's devices.
    """

    direction: Direction
    stage: int
    rank: int
    values: tuple[Value, ...]
    indices: tuple[int, ...]
    layouts: tuple[ShardLayout, ...]

    @property
    def border(self) -> dict[int, ShardLayout]:
        """Return index → layout."""
        return dict(zip(self.indices, self.layouts, strict=True))


class _Hand(NamedTuple):
    """Describe values that one stage of a rank hands over to another.

    Attributes:
        direction: What is handed over.
        stage: The stage on the other side.
        origin: The stage that made the values, or that gives their gradients.
        slots: Slot of each value in the output that it is part of → which input or
            output of this stage it is.
    """

    direction: Direction
    stage: int
    origin: int
    slots: dict[int, int]


class Links:
    """Exchange the values of one stage with the other stages.

    Args:
        ends: What the stage takes and makes.
        exchange: Carries values between stages.
        world: The devices of this rank.

    Attributes:
        borders: What the stage's programs do themselves.
        unused: Outputs that need a gradient, but that no stage uses.
    """

    def __init__(self, ends: Ends, exchange: Exchange, world: World) -> None:
        self._ends = ends
        self._tilings: Tilings = {}
        self._stage = ends.stage
        self._exchange = exchange
        self._world = world
        self._own = ends.fans[ends.stage]
        self._input_of = {value: index for index, value in enumerate(ends.values)}
        is_remote = self._is_remote
        producers = sorted({value.stage for value in ends.values})
        consumers = sorted(self._own.uses)
        self._arriving = self._posts(self._arrival, producers)
        self._leaving = self._posts(self._departure, consumers)
        self._taken = [hand for p in producers for hand in self._hands_to(p)]
        self._given = list(self._hands_from())
        self._grads_arriving = self._posts(self._grads_from, consumers)
        self._grads_leaving = self._posts(self._grads_to, producers)
        self._grads_taken = [
            _Hand("B", c, c, {slot: slot for slot in self._with_grad(c)})
            for c in consumers
            if not is_remote(c) and self._with_grad(c)
        ]
        self._grads_given = [
            _Hand("B", p, self._stage, self._inputs_with_grad(p))
            for p in producers
            if not is_remote(p) and self._inputs_with_grad(p)
        ]
        self.borders = self._borders()
        self.unused = [
            index
            for index, spec in enumerate(ends.outputs)
            if spec.requires_grad and not self.borders.consumers[index]
        ]

    def agree(self, tilings: Tilings) -> None:
        """Learn how values are tiled over other ranks, before the first message."""
        self._tilings = tilings

    def moves(self) -> Iterator[str]:
        """Say what is laid out anew on its way; its gradient is on the way back."""
        for word, posts in (("from", self._arriving), ("to", self._leaving)):
            for post in posts:
                for layout, far in zip(post.layouts, self._there(post), strict=True):
                    own = layout.tiling
                    first, last = (far, own) if word == "from" else (own, far)
                    if first != last:
                        value = f"{type_text(layout.shape, layout.dtype)} {word}"
                        yield f"{value} stage {post.stage}: {first} -> {last}"

    # For each microbatch.

    def take_inputs(self, microbatch: int) -> dict[str, Tensor]:
        """Return the received inputs of a forward, or routes for them."""
        return {
            **self._take(self._taken, microbatch, _input),
            **self._receive(self._arriving, microbatch, _input),
            **self._routes(self._leaving, microbatch),
        }

    def give_outputs(self, microbatch: int, result: Forwarded) -> None:
        """Hand on what a forward made or received, unless its program did."""
        for hand in self._given:
            is_own = hand.origin == self._stage
            values = result.outputs if is_own else result.received
            message = Message("F", hand.stage, microbatch, hand.origin)
            given = {slot: values[i].detach() for slot, i in hand.slots.items()}
            self._exchange.give(message, given)
        for post in self._leaving:
            if not self._is_in_graph(post):
                message = self._leaving_message(post, microbatch)
                sent = [result.outputs[index] for index in post.indices]
                self._exchange.send(message, post.rank, sent, self._there(post))

    def take_grads(self, microbatch: int) -> dict[str, Tensor]:
        """Return the gradients of the outputs for a backward, or routes for them."""
        name_of = self.borders.tangent_name
        return {
            **self._take(self._grads_taken, microbatch, name_of),
            **self._receive(self._grads_arriving, microbatch, name_of),
            **self._routes(self._grads_leaving, microbatch),
        }

    def give_grads(self, microbatch: int, grads: Mapping[int, Tensor | None]) -> None:
        """Hand back the gradients of received inputs, unless the program did."""
        for hand in self._grads_given:
            message = Message("B", hand.stage, microbatch, self._stage)
            given = {slot: self._grad(grads, i) for slot, i in hand.slots.items()}
            self._exchange.give(message, given)
        for post in self._grads_leaving:
            if not self._is_in_graph(post):
                message = self._leaving_message(post, microbatch)
                sent = [self._grad(grads, index) for index in post.indices]
                self._exchange.send(message, post.rank, sent, self._there(post))

    def _grad(self, grads: Mapping[int, Tensor | None], index: int) -> Tensor:
        found = grads.get(index)
        if found is not None:
            return found
        return self._world.zeros(self._ends.received[index])

    def _take(
        self,
        hands: Sequence[_Hand],
        microbatch: int,
        name_of: Callable[[int, int], str],
    ) -> dict[str, Tensor]:
        """Take what stages of this rank gave; `name_of` gets an index and a stage."""
        found: dict[str, Tensor] = {}
        for hand in hands:
            message = Message(hand.direction, self._stage, microbatch, hand.origin)
            values = self._exchange.take(message, hand.slots)
            found |= {name_of(i, hand.stage): values[s] for s, i in hand.slots.items()}
        return found

    def _receive(
        self,
        posts: Sequence[_Post],
        microbatch: int,
        name_of: Callable[[int, int], str],
    ) -> dict[str, Tensor]:
        """Receive what other ranks send, or return routes for it."""
        found: dict[str, Tensor] = {}
        for post in posts:
            message = Message(post.direction, self._stage, microbatch, post.stage)
            if self._is_in_graph(post):
                found[route_in(post.stage)] = self._exchange.receive_route(
                    message, post.rank, post.layouts, self._there(post)
                )
                continue
            values = self._exchange.receive(
                message, post.rank, post.layouts, self._there(post)
            )
            names = [name_of(index, post.stage) for index in post.indices]
            found |= zip(names, values, strict=True)
        return found

    def _routes(self, posts: Sequence[_Post], microbatch: int) -> dict[str, Tensor]:
        """Return the routes of what programs send."""
        return {
            route_out(post.stage): self._exchange.send_route(
                self._leaving_message(post, microbatch),
                post.rank,
                post.layouts,
                self._there(post),
            )
            for post in posts
            if self._is_in_graph(post)
        }

    def _there(self, post: _Post) -> list[Tiling]:
        """Return how the values of a message lie on the other rank."""
        tilings = self._tilings[post.stage]
        return [tilings[value] for value in post.values]

    def _leaving_message(self, post: _Post, microbatch: int) -> Message:
        return Message(post.direction, post.stage, microbatch, self._stage)

    # Once.

    def _borders(self) -> Borders:
        def own(posts: Sequence[_Post]) -> dict[int, dict[int, ShardLayout]]:
            return {
                post.stage: post.border for post in posts if self._is_in_graph(post)
            }

        sent_by_python = [p for p in self._leaving if not self._is_in_graph(p)]
        returned = {i for post in sent_by_python for i in post.indices}
        for hand in self._given:
            returned |= (
                set(hand.slots.values()) if hand.origin == self._stage else set()
            )
        is_last = self._stage == len(self._own.ranks) - 1
        count = len(self._ends.outputs)
        return Borders(
            inputs=own(self._arriving),
            outputs=own(self._leaving),
            tangents=own(self._grads_arriving),
            grads=own(self._grads_leaving),
            consumers={i: self._own.consumers_of(i) for i in range(count)},
            returned=range(count) if is_last else returned,
            handed_on={
                index
                for hand in self._given
                for index in hand.slots.values()
                if hand.origin != self._stage
            },
        )

    def _posts(
        self, describe: Callable[[int], _Post], stages: Iterable[int]
    ) -> list[_Post]:
        """Describe what is exchanged with those stages that are on other ranks."""
        posts = [describe(stage) for stage in stages if self._is_remote(stage)]
        return [post for post in posts if post.indices]

    def _arrival(self, producer: int) -> _Post:
        slots = self._ends.fans[producer].passed(producer, self._stage)
        indices = [self._input_of[Value(producer, slot)] for slot in slots]
        return self._post("F", producer, indices, is_input=True)

    def _departure(self, consumer: int) -> _Post:
        slots = self._own.passed(self._stage, consumer)
        return self._post("F", consumer, slots, is_input=False)

    def _grads_from(self, consumer: int) -> _Post:
        slots = self._with_grad(consumer)
        return self._post("B", consumer, slots, is_input=False)

    def _grads_to(self, producer: int) -> _Post:
        indices = list(self._inputs_with_grad(producer).values())
        return self._post("B", producer, indices, is_input=True)

    def _post(
        self,
        direction: Direction,
        stage: int,
        indices: Sequence[int],
        *,
        is_input: bool,
    ) -> _Post:
        ends = self._ends
        specs = ends.received if is_input else ends.outputs
        return _Post(
            direction=direction,
            stage=stage,
            rank=self._own.ranks[stage],
            values=tuple(
                ends.values[i] if is_input else Value(self._stage, i) for i in indices
            ),
            indices=tuple(indices),
            layouts=tuple(self._world.shard_layout(specs[i]) for i in indices),
        )

    def _hands_to(self, producer: int) -> Iterator[_Hand]:
        """Say what other stages of the rank give of a producer's values."""
        fan = self._ends.fans[producer]
        remote = fan.passed(producer, self._stage) if self._is_remote(producer) else ()
        slots = [slot for slot in fan.uses[self._stage] if slot not in remote]
        inputs = {slot: self._input_of[Value(producer, slot)] for slot in slots}
        if inputs:
            yield _Hand("F", producer, producer, inputs)

    def _hands_from(self) -> Iterator[_Hand]:
        """Say what this stage gives other stages of the rank."""
        for origin, fan in self._ends.fans.items():
            for consumer in fan.uses:
                if consumer == self._stage or self._is_remote(consumer):
                    continue
                slots = fan.passed(self._stage, consumer)
                is_own = origin == self._stage
                indices = {
                    slot: slot if is_own else self._input_of[Value(origin, slot)]
                    for slot in slots
                }
                if indices:
                    yield _Hand("F", consumer, origin, indices)

    def _with_grad(self, consumer: int) -> list[int]:
        """Return which outputs a consumer gives a gradient for."""
        outputs = self._ends.outputs
        return [s for s in self._own.uses[consumer] if outputs[s].requires_grad]

    def _inputs_with_grad(self, producer: int) -> dict[int, int]:
        """Return slot → input of a producer's values that need a gradient."""
        return {
            value.slot: index
            for value, index in self._input_of.items()
            if value.stage == producer and self._ends.received[index].requires_grad
        }

    def _is_remote(self, stage: int) -> bool:
        return self._own.ranks[stage] != self._own.ranks[self._stage]

    def _is_in_graph(self, post: _Post) -> bool:
        return self._exchange.is_in_graph(post.rank)


def _input(index: int, _: int) -> str:
    return input_role(index)
