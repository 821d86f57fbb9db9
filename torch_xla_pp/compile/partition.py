"""From one joint graph to the functions of a stage.

Terms: a *function* is a piece of the joint graph with named inputs and outputs; the
*frontier* of a piece is what it reads from the pieces before it. The pieces:

* forward: the outputs, new buffers, and the frontier of the backward (*saved*)
* inference: the outputs and new buffers alone
* backward: gradients of inputs and of parameters
* backward input and backward weight: the same work, cut in two, so that a
  zero-bubble schedule may delay the second (Qi et al., Zero Bubble Pipeline
  Parallelism, 2023); what the first computes and the second reads is its *residual*

A view or a factory call on a frontier is moved behind it: saving its operand costs no
memory, saving its result would. Parameters, inputs and constants are never outputs
of a function: they keep their names on both sides.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from torch_xla_pp.compile.export import JointGraph, is_random

_aten = torch.ops.aten

_VIEWS = frozenset(
    {
        _aten.alias.default,
        _aten.detach.default,
        _aten.expand.default,
        _aten.permute.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.squeeze.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unsqueeze.default,
        _aten.view.default,
        _aten._unsafe_view.default,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """Hold a piece of the joint graph that becomes one program.

    Args:
        name: What it is, for messages.
        module: Takes the inputs in order and returns a tuple of the outputs.
        inputs: Names of the inputs: roles of the joint graph or names of its nodes.
        outputs: Names of the outputs, none twice.
    """

    name: str
    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFunctions:
    """Hold the functions of a stage and the names of what they exchange.

    Args:
        forward: Computes the outputs and what the backward reads.
        inference: Computes the outputs alone.
        backward: Full backward, None if the stage has no gradients to compute.
        backward_input: The part of it that the previous stage waits for, None if
            no input needs a gradient.
        backward_weight: The rest of it, None if no parameter needs a gradient.
        outputs: Name of each output of the stage.
        buffer_updates: Buffer role → name of its new value.
        input_grads: Input index → name of its gradient, None for one that is zero.
        parameter_grads: Parameter role → name of its accumulated gradient.
    """

    forward: Function
    inference: Function
    backward: Function | None
    backward_input: Function | None
    backward_weight: Function | None
    outputs: tuple[str, ...]
    buffer_updates: Mapping[str, str]
    input_grads: Mapping[int, str | None]
    parameter_grads: Mapping[str, str]


def accumulator(role: str) -> str:
    """Return the name under which the gradient so far of a parameter is passed."""
    return f"sum:{role}"


def partition_joint(joint: JointGraph) -> StageFunctions:
    """Cut a joint graph into the functions of its stage."""
    return _Cut(joint).functions()


def value_and_grads(joint: JointGraph) -> Function:
    """Return the function of all outputs and gradients of inputs."""
    return _Cut(joint).value_and_grads()


class _Cut:
    """Hold the node sets of a cut while its functions are made."""

    def __init__(self, joint: JointGraph) -> None:
        self._joint = joint
        self._names = {n: joint.roles.get(n, n.name) for n in joint.graph.graph.nodes}
        self._forward_results = joint.outputs + list(joint.buffer_updates.values())
        self._input_results = [g for g in joint.input_grads.values() if g is not None]
        self._weight_results = list(joint.parameter_grads.values())

    def value_and_grads(self) -> Function:
        return self._forward_piece("loss", self._joint.outputs + self._input_results)

    def functions(self) -> StageFunctions:
        forward = self._closure(self._forward_results, frozenset())
        grads = self._input_results + self._weight_results
        backward = self._closure(grads, forward) - forward
        saved = self._frontier(backward | set(grads), forward)
        first = self._closure(self._input_results, forward) - forward
        second = self._closure(self._weight_results, forward | first) - forward - first
        passed = self._frontier(second | set(self._weight_results), first)
        joint = self._joint
        inputs, weights = self._input_results, joint.parameter_grads
        return StageFunctions(
            forward=self._forward_piece("forward", self._forward_results + saved),
            inference=self._forward_piece("inference", self._forward_results),
            backward=self._backward_piece("backward", inputs, weights, saved),
            backward_input=self._backward_piece(
                "backward_input", inputs + passed, {}, saved
            ),
            backward_weight=self._backward_piece(
                "backward_weight", [], weights, saved + passed
            ),
            outputs=tuple(self._names[n] for n in joint.outputs),
            buffer_updates={r: self._names[n] for r, n in joint.buffer_updates.items()},
            input_grads={
                i: None if n is None else self._names[n]
                for i, n in joint.input_grads.items()
            },
            parameter_grads={
                role: _accumulated(role) for role in joint.parameter_grads
            },
        )

    def _closure(
        self, results: Iterable[fx.Node], known: frozenset[fx.Node] | set[fx.Node]
    ) -> set[fx.Node]:
        """Return the nodes that `results` depend on, without placeholders.

        Every part of a multi-output node counts as soon as the node does.
        """
        seen: set[fx.Node] = set(known)
        todo = list(results)
        while todo:
            node = todo.pop()
            if node in seen or node.op == "placeholder":
                continue
            seen.add(node)
            todo.extend(node.all_input_nodes)
            if isinstance(node.meta.get("val"), (tuple, list)):
                todo.extend(node.users)
        return seen

    def _frontier(
        self, piece: set[fx.Node], before: set[fx.Node] | frozenset[fx.Node]
    ) -> list[fx.Node]:
        """Return what `piece` reads from `before`, views and factories left out."""
        found: dict[fx.Node, None] = {}
        new = piece - before
        todo = [n for node in new for n in node.all_input_nodes] + list(piece & before)
        seen = set()
        while todo:
            node = todo.pop()
            if node in seen or node not in before:
                continue
            seen.add(node)
            if _is_cheap(node):
                todo.extend(node.all_input_nodes)
            else:
                found[node] = None
        order = {node: i for i, node in enumerate(self._joint.graph.graph.nodes)}
        return sorted(found, key=order.__getitem__)

    def _forward_piece(self, name: str, results: list[fx.Node]) -> Function:
        """Extract the piece that computes `results` from placeholders."""
        piece = _Piece(self._joint.roles, ())
        outputs = {
            self._names[node]: piece.copy(node)
            for node in results
            if node.op != "placeholder"
        }
        return piece.function(name, outputs)

    def _backward_piece(
        self,
        name: str,
        results: list[fx.Node],
        weights: Mapping[str, fx.Node],
        given: Iterable[fx.Node],
    ) -> Function | None:
        """Extract a piece of the backward that adds up gradients of `weights`."""
        piece = _Piece(self._joint.roles, given)
        outputs = {
            self._names[node]: piece.copy(node)
            for node in results
            if node.op != "placeholder"
        }
        for role, grad in weights.items():
            outputs[_accumulated(role)] = piece.accumulate(role, piece.copy(grad))
        return piece.function(name, outputs) if outputs else None


def _accumulated(role: str) -> str:
    return f"new_{accumulator(role)}"


def _is_cheap(node: fx.Node) -> bool:
    """Return whether computing `node` again beats keeping its result."""
    if node.target in _VIEWS:
        return True
    is_factory = node.op == "call_function" and not node.all_input_nodes
    return is_factory and not is_random(node)


class _Piece:
    """Build a graph by copying nodes on demand, back to what is given."""

    def __init__(self, roles: Mapping[fx.Node, str], given: Iterable[fx.Node]) -> None:
        self._roles = roles
        self._given = frozenset(given)
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._inputs: dict[str, fx.Node] = {}

    def copy(self, node: fx.Node) -> fx.Node:
        """Copy `node` and all it depends on, if that was not done yet."""
        todo = [node]
        while todo:
            current = todo[-1]
            if current in self._copies:
                todo.pop()
            elif current.op == "placeholder" or current in self._given:
                name = self._roles.get(current, current.name)
                self._copies[current] = self._placeholder(name)
            else:
                missing = [n for n in current.all_input_nodes if n not in self._copies]
                todo.extend(missing)
                if not missing:
                    self._copies[current] = self._graph.node_copy(
                        current, self._copies.__getitem__
                    )
        return self._copies[node]

    def accumulate(self, role: str, grad: fx.Node) -> fx.Node:
        """Add `grad` to the sum of gradients that is passed in for `role`."""
        total = self._placeholder(accumulator(role))
        return self._graph.call_function(_aten.add.Tensor, (total, grad))

    def function(self, name: str, outputs: Mapping[str, fx.Node]) -> Function:
        """Close the graph."""
        self._graph.output(tuple(outputs.values()))
        return Function(
            name=name,
            module=fx.GraphModule(torch.nn.Module(), self._graph),
            inputs=tuple(self._inputs),
            outputs=tuple(outputs),
        )

    def _placeholder(self, name: str) -> fx.Node:
        """Return the input `name`, added behind the inputs so far."""
        if name not in self._inputs:
            last = next(reversed(self._inputs.values()), None)
            with self._graph.inserting_after(last):
                self._inputs[name] = self._graph.placeholder(f"arg_{len(self._inputs)}")
        return self._inputs[name]
