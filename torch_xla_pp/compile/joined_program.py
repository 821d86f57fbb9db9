"""The forward, the loss and the backward of a microbatch as one program.

It is for the last stage, whose backward waits for no other stage. What the forward
saves and the gradients of outputs never leave the program, and one dispatch takes the
place of three. The backward may be that of inputs alone: what the rest of it reads
leaves the program then, see docs/design/046-last-backward.md.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torch_xla_pp.compile.border import border_names
from torch_xla_pp.compile.loss_program import LossProgram
from torch_xla_pp.compile.partition import Function
from torch_xla_pp.compile.program import BoundValues, Program
from torch_xla_pp.compile.program_spec import ProgramSpec


class Scored(NamedTuple):
    """The results for one microbatch.

    Attributes:
        loss: Its loss.
        metrics: What the loss function returned beside it.
        results: The results of the backward, what the rest of it reads, and new
            buffers, by name.
    """

    loss: Tensor
    metrics: Any
    results: dict[str, Tensor]


class JoinedProgram:
    """A program that computes the loss of a microbatch and its gradients.

    Args:
        forward: The spec of the forward, which sends nothing.
        backward: The spec of the full backward or that of inputs, which receives
            nothing.
        outputs: Name of each output of the stage.
        updates: Names of the forward's new buffers.
        loss: The loss of these outputs.
    """

    def __init__(
        self,
        forward: ProgramSpec,
        backward: ProgramSpec,
        outputs: Sequence[str],
        updates: Collection[str],
        loss: LossProgram,
    ) -> None:
        self._loss = loss
        scored = loss.function_of(outputs)
        self._losses = scored.outputs[: loss.num_results]
        wanted = {*(backward.wanted or ()), *updates, *self._losses}
        functions = (forward.function, scored, backward.function)
        made = wanted.union(border_names(backward.sent))
        name = f"{forward.function.name} and {backward.function.name}"
        spec = replace(
            backward,
            function=_in_sequence(name.replace("_", " "), functions, made),
            pins={**forward.pins, **backward.pins},
            checked=forward.checked,
            received=forward.received,
            wanted=wanted,
            recycled=(),
            made_flat=(),
        )
        self.program = Program(spec)

    def __call__(
        self,
        fixed: Mapping[str, Tensor],
        live: Mapping[str, Tensor],
        seed: int,
        others: Sequence[Tensor],
        scale: Tensor,
    ) -> Scored:
        """Enqueue the program.

        Args:
            fixed: The stage's values, see `BoundValues`.
            live: What forward and backward read besides; `sum:` entries are void
                afterwards.
            seed: Seed of the microbatch's random numbers.
            others: What the loss reads behind the outputs: the target, and weights.
            scale: As for `LossProgram`.
        """
        values = {**live, **self._loss.operands(others, scale)}
        results = self.program(values, seed, BoundValues.of(fixed))
        loss, metrics = self._loss.filled([results[name] for name in self._losses])
        return Scored(loss, metrics, results)


def _in_sequence(
    name: str, functions: Sequence[Function], wanted: Collection[str]
) -> Function:
    """Return a function that runs others, which read what those before return.

    It returns what is wanted, first that of the last function: see `_Piece.function`
    for why sums come first.
    """
    graph = fx.Graph()
    inputs: dict[str, fx.Node] = {}
    made: set[str] = set()
    for function in functions:
        for role, place in _places(function).items():
            if role not in made and role not in inputs:
                inputs[role] = graph.placeholder(f"arg_{len(inputs)}")
                inputs[role].meta = place.meta
        made.update(function.outputs)
    known = dict(inputs)
    for function in functions:
        copies = {place: known[role] for role, place in _places(function).items()}
        for node in function.graph.nodes:
            if node.op == "call_function":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta = node.meta
        results = map(copies.__getitem__, function.results)
        known |= zip(function.outputs, results, strict=True)
    ordered = [one for function in reversed(functions) for one in function.outputs]
    outputs = tuple(one for one in dict.fromkeys(ordered) if one in wanted)
    graph.output(tuple(known[one] for one in outputs))
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Function(name=name, module=module, inputs=tuple(inputs), outputs=outputs)


def _places(function: Function) -> dict[str, fx.Node]:
    """Return the placeholder of each input."""
    places = function.graph.find_nodes(op="placeholder")
    return dict(zip(function.inputs, places, strict=True))
