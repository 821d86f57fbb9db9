"""From one joint graph to the functions of a stage.

Terms: a *function* is a piece of the joint graph with named inputs and outputs; the
*frontier* of a piece is what it reads from the pieces before it. The pieces:

* forward: the outputs, new buffers, and the frontier of the backward (*saved*)
* inference: the same graph, of which a program returns no more than the outputs and
  new buffers
* backward: gradients of inputs and of parameters
* backward input and backward weight: the same work, cut in two, so that a
  zero-bubble schedule may delay the second (Qi et al., Zero Bubble Pipeline
  Parallelism, 2023); what the first computes and the second reads is its *residual*

A view or a factory call on a frontier is moved behind it: saving its operand costs no
memory, saving its result would. But where views alone are read that are smaller
together than what they are views of, they are on the frontier, see `parts`. Parameters,
inputs and constants are never outputs of a function: they keep their names on both
sides.

*Rematerialisation* moves more behind the frontier of the backward: forward values
that are computed again, from what is saved, where the backward reads them. `Remat`
says which. The laws:

* Random values are saved, never drawn again; so are values made of them alone, as a
  mask is smaller than the numbers that it was made of.
* A value made of a buffer that the forward updates is saved, as the old value of the
  buffer is gone in the backward.
* Backward input and backward weight together do what the backward does: what the
  first computes again and the second reads is in the residual.
* Every function has its nodes in the order of the joint graph, so that random
  operations draw in the same order in all of them.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload

from torch_xla_pp.compile.joint_graph import JointGraph, is_random
from torch_xla_pp.compile.names import (
    accumulated,
    accumulator,
    is_input,
    is_tangent,
)
from torch_xla_pp.compile.ops import VIEWS
from torch_xla_pp.compile.value_parts import fewest_bytes, root_of
from torch_xla_pp.phases import phase

Remat: TypeAlias = Literal["none", "full"] | Collection[OpOverload]
"""Which forward values are computed again in the backward.

* `"none"`: those of functions under `torch.utils.checkpoint.checkpoint`, as in eager.
* `"full"`: all; saved are the inputs of the stage and random values alone.
* op overloads, e.g. `[torch.ops.aten.mm.default]`: all but the results of these, as
  in the list that `torch.utils.checkpoint.create_selective_checkpoint_contexts` takes.
"""

_aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A function that becomes one program: most often, a piece of the joint graph.

    Args:
        name: What it is, for messages.
        module: Takes the inputs in order and returns the outputs in order; a graph
            where constraints count.
        inputs: Names of the inputs: roles of the joint graph or names of its nodes.
        outputs: Names of the outputs, none twice.
    """

    name: str
    module: torch.nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def graph(self) -> fx.Graph:
        """Return the graph, where the module is one."""
        assert isinstance(self.module, fx.GraphModule)
        return self.module.graph

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """Return the node of each output, likewise."""
        (found,) = self.graph.output_node().args
        return found  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFunctions:
    """The functions of a stage and the names of what they exchange.

    Args:
        forward: Computes the outputs and what the backward reads.
        inference: The same, of which a program returns the outputs alone.
        backward: Full backward, None if the stage has no gradients to compute.
        backward_input: The part of it that the previous stage waits for, None if
            no input needs a gradient.
        backward_weight: The rest of it, None if no parameter needs a gradient.
        outputs: Name of each output of the stage.
        buffer_updates: Buffer role → name of its new value.
        input_grads: Input index → name of its gradient, None for one that is zero.
        parameter_grads: Parameter role → name of its accumulated gradient, or of the
            gradient alone where the program adds it to the sum.
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


def nothing(name: str) -> Function:
    """Return a function that computes nothing, for a program that passes values on."""
    graph = fx.Graph()
    graph.output(())
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Function(name=name, module=module, inputs=(), outputs=())


@phase("partition")
def partition_joint(
    joint: JointGraph, remat: Remat = "none", unsummed: Collection[str] = ()
) -> StageFunctions:
    """Cut a joint graph into the functions of its stage.

    Args:
        joint: What to cut.
        remat: Which forward values are computed again in the backward.
        unsummed: Roles of parameters whose gradients the programs add to sums, not the
            functions.

    Raises:
        ValueError: `remat` is neither a known word nor a collection of op overloads.
    """
    return _Cut(joint, remat, unsummed).functions()


def check_remat(remat: Remat) -> None:
    """Refuse what is not a policy.

    Raises:
        ValueError: `remat` is neither a known word nor a collection of op overloads.
    """
    _kept_ops(remat)


class _Policy:
    """The choice of forward values that a reader in the backward computes again."""

    def __init__(self, joint: JointGraph, remat: Remat) -> None:
        kept_ops = _kept_ops(remat)
        self._regions = joint.regions
        self._is_everywhere = kept_ops is not None
        self._kept = _random(joint) | _made_of_updated(joint)
        self._kept |= (
            joint.selected
            if kept_ops is None
            else {n for n in joint.graph.graph.nodes if n.target in kept_ops}
        )

    def region(self, node: fx.Node) -> int | None:
        """Return the region of which `node` is a part, None for no region."""
        return 0 if self._is_everywhere else self._regions.get(node)

    def is_computed_again(self, node: fx.Node, reader: int | None) -> bool:
        """Return whether a reader in region `reader` computes `node` again.

        Values of a region that later operations read are saved, as in eager.
        """
        if _is_cheap(node):
            return True
        made = node.all_input_nodes[0] if node.target is operator.getitem else node
        is_shared = reader is not None and self.region(made) == reader
        return is_shared and made not in self._kept and node not in self._kept


def _kept_ops(remat: Remat) -> frozenset[OpOverload] | None:
    """Return the ops whose results are saved, None where eager decides."""
    if isinstance(remat, str):
        known: dict[str, frozenset[OpOverload] | None] = {
            "none": None,
            "full": frozenset(),
        }
        if remat in known:
            return known[remat]
    elif isinstance(remat, Collection):
        strange = [repr(x) for x in remat if not isinstance(x, OpOverload)]
        if not strange:
            return frozenset(remat)
        raise ValueError(
            f"remat: expected op overloads, got {', '.join(strange)}. Pass overloads "
            "such as torch.ops.aten.mm.default."
        )
    raise ValueError(
        f"remat: expected 'none', 'full' or a collection of op overloads, got "
        f"{remat!r}. Pass e.g. [torch.ops.aten.mm.default] to save matrix products."
    )


def _random(joint: JointGraph) -> set[fx.Node]:
    """Return the results of random operations and what is made of them alone."""
    found: set[fx.Node] = set()
    for node in joint.graph.graph.nodes:
        inputs = node.all_input_nodes
        if is_random(node) or (inputs and found.issuperset(inputs)):
            found.add(node)
    return found


def _made_of_updated(joint: JointGraph) -> set[fx.Node]:
    """Return the nodes that read buffers which the forward updates, views left out."""
    found: set[fx.Node] = set()
    buffers = {n for n, role in joint.roles.items() if role in joint.buffer_updates}
    for node in joint.graph.graph.nodes:
        if not buffers.isdisjoint(node.all_input_nodes):
            (buffers if _is_cheap(node) else found).add(node)
    return found


def value_and_grads(joint: JointGraph) -> Function:
    """Return the function of all outputs and gradients of inputs."""
    return _Cut(joint).value_and_grads()


class _Cut:
    """The node sets of a cut while its functions are made."""

    def __init__(
        self,
        joint: JointGraph,
        remat: Remat = "none",
        unsummed: Collection[str] = (),
    ) -> None:
        self._joint = joint
        self._unsummed = unsummed
        self._policy = _Policy(joint, remat)
        self._names = {n: joint.roles.get(n, n.name) for n in joint.graph.graph.nodes}
        self._forward_results = joint.outputs + list(joint.buffer_updates.values())
        self._input_results = [g for g in joint.input_grads.values() if g is not None]
        self._weight_results = list(joint.parameter_grads.values())

    def value_and_grads(self) -> Function:
        return self._forward_piece("loss", self._joint.outputs + self._input_results)

    def functions(self) -> StageFunctions:
        saved = self._saved()
        passed = self._passed(saved)
        joint = self._joint
        inputs, weights = self._input_results, joint.parameter_grads
        forward = self._forward_piece("forward", self._forward_results + saved)
        backward = self._backward_piece("backward", inputs, weights, saved)
        first = self._backward_piece("backward_input", inputs + passed, {}, saved)
        rest = backward
        if first is not None:
            rest = self._backward_piece("backward_weight", [], weights, saved + passed)
        return StageFunctions(
            forward=forward,
            # What is saved is computed on the way, and then dropped by XLA.
            inference=replace(forward, name="inference"),
            backward=backward,
            backward_input=first,
            backward_weight=rest and replace(rest, name="backward_weight"),
            outputs=tuple(self._names[n] for n in joint.outputs),
            buffer_updates={r: self._names[n] for r, n in joint.buffer_updates.items()},
            input_grads={
                i: None if n is None else self._names[n]
                for i, n in joint.input_grads.items()
            },
            parameter_grads={role: accumulated(role) for role in joint.parameter_grads},
        )

    def _saved(self) -> list[fx.Node]:
        """Return what the forward saves for the backward."""
        forward = _closure(self._forward_results)
        grads = self._input_results + self._weight_results
        region = self._policy.region
        reads = [
            (read, region(node))
            for node in _closure(grads, forward)
            for read in node.all_input_nodes
        ]
        reads += [(grad, region(grad)) for grad in grads]
        found = _frontier(reads, forward, self._policy.is_computed_again)
        # A value may be saved for one reader that another would compute again.
        received = self._received(is_input)
        return self._ordered(_least(grads, found.union(received)))

    def _passed(self, saved: list[fx.Node]) -> list[fx.Node]:
        """Return what backward input computes and backward weight reads."""
        if not self._input_results:
            return []
        first = _closure(self._input_results, saved)
        weights = self._weight_results
        reads = [(node, None) for node in _reads(weights, {*saved, *first})]
        found = _frontier(reads, first, lambda node, _: _is_cheap(node))
        received = self._received(lambda role: is_input(role) or is_tangent(role))
        least = _least(weights, {*saved, *found, *received})
        return self._ordered(least.difference(saved))

    def _received(self, is_one: Callable[[str], bool]) -> set[fx.Node]:
        return {node for node, role in self._joint.roles.items() if is_one(role)}

    def _ordered(self, nodes: set[fx.Node]) -> list[fx.Node]:
        return [node for node in self._joint.graph.graph.nodes if node in nodes]

    def _forward_piece(self, name: str, results: list[fx.Node]) -> Function:
        """Extract the piece that computes `results` from placeholders."""
        return _Piece(self._joint, results, ()).function(name, self._named(results))

    def _backward_piece(
        self,
        name: str,
        results: list[fx.Node],
        weights: Mapping[str, fx.Node],
        given: Iterable[fx.Node],
    ) -> Function | None:
        """Extract a piece of the backward that adds up gradients of `weights`."""
        piece = _Piece(self._joint, [*results, *weights.values()], given)
        outputs = self._named(results)
        sums = {
            accumulated(role): piece.gradient(
                grad, "" if role in self._unsummed else accumulator(role)
            )
            for role, grad in weights.items()
        }
        return piece.function(name, outputs, sums) if outputs or sums else None

    def _named(self, results: Iterable[fx.Node]) -> dict[str, fx.Node]:
        return {self._names[n]: n for n in results if n.op != "placeholder"}


def _is_cheap(node: fx.Node) -> bool:
    """Return whether computing `node` again beats keeping its result."""
    if node.target in VIEWS:
        return True
    if node.target is operator.getitem:
        return _is_cheap(node.all_input_nodes[0])
    is_factory = node.op == "call_function" and not node.all_input_nodes
    return is_factory and not is_random(node)


def _closure(results: Iterable[fx.Node], known: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """Return the nodes to compute for `results`, given placeholders and `known`.

    Every part of a multi-output node counts as soon as the node does.
    """
    known = set(known)
    found: set[fx.Node] = set()
    todo = list(results)
    while todo:
        node = todo.pop()
        if node in found or node in known or node.op == "placeholder":
            continue
        found.add(node)
        todo.extend(node.all_input_nodes)
        if isinstance(node.meta.get("val"), (tuple, list)):
            todo.extend(node.users)
    return found


def _reads(results: Iterable[fx.Node], known: Iterable[fx.Node]) -> set[fx.Node]:
    """Return `results` and all that is read to compute them, given `known`."""
    computed = _closure(results, known)
    return {*results, *(read for node in computed for read in node.all_input_nodes)}


def _least(results: Iterable[fx.Node], known: set[fx.Node]) -> set[fx.Node]:
    """Return what to keep of known values to compute `results`, or their parts.

    Placeholders are kept in any case, and not among it.
    """
    read = {*results}
    for node in _closure(results, known):
        read.update(() if _is_cheap(node) else node.all_input_nodes)
    kept = fewest_bytes(node for node in read if root_of(node) in known)
    return {node for node in kept if node.op != "placeholder"}


def _frontier(
    reads: Iterable[tuple[fx.Node, int | None]],
    before: set[fx.Node],
    is_computed_again: Callable[[fx.Node, int | None], bool],
) -> set[fx.Node]:
    """Return what must be passed from `before` on for `reads`, nodes with regions.

    A reader that computes a value again reads the operands of that value.
    """
    found: set[fx.Node] = set()
    seen: set[tuple[fx.Node, int | None]] = set()
    todo = list(reads)
    while todo:
        node, reader = todo.pop()
        if (node, reader) in seen or node not in before:
            continue
        seen.add((node, reader))
        if is_computed_again(node, reader):
            todo.extend((read, reader) for read in node.all_input_nodes)
        else:
            found.add(node)
    return found


class _Piece:
    """A graph: copies of what `results` depend on, back to what is given."""

    def __init__(
        self, joint: JointGraph, results: Iterable[fx.Node], given: Iterable[fx.Node]
    ) -> None:
        self._roles = joint.roles
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._inputs: dict[str, fx.Node] = {}
        computed = _closure(results, given)
        for node in joint.graph.graph.nodes:
            if node in computed:
                self._copies[node] = self._graph.node_copy(node, self._copy)
                # One for all pieces; thousands of copies would take some MiB.
                self._copies[node].meta = node.meta

    def gradient(self, grad: fx.Node, total: str) -> fx.Node:
        """Return a gradient, added to the sum of that name unless it is ""."""
        if not total:
            return self._copy(grad)
        args = self._placeholder(total, grad), self._copy(grad)
        return self._graph.call_function(_aten.add.Tensor, args)

    def function(
        self,
        name: str,
        results: Mapping[str, fx.Node],
        sums: Mapping[str, fx.Node] | None = None,
    ) -> Function:
        """Close the graph; it returns `sums`, and copies of `results`.

        XLA gives donated memory to results of its size, first to first: a result before
        the sums would take that of a sum, which had to be copied.
        """
        outputs = {**(sums or {}), **{n: self._copy(r) for n, r in results.items()}}
        self._graph.output(tuple(outputs.values()))
        return Function(
            name=name,
            module=fx.GraphModule(torch.nn.Module(), self._graph),
            inputs=tuple(self._inputs),
            outputs=tuple(outputs),
        )

    def _copy(self, node: fx.Node) -> fx.Node:
        """Return the copy of a node that is computed or given."""
        if node in self._copies:
            return self._copies[node]
        return self._placeholder(self._roles.get(node, node.name), node)

    def _placeholder(self, name: str, like: fx.Node) -> fx.Node:
        """Return the input `name`, added behind the inputs so far.

        Args:
            name: Its name.
            like: A node with such a value.
        """
        if name not in self._inputs:
            last = next(reversed(self._inputs.values()), None)
            graph = self._graph
            # Without a node, after is at the end, and before at the beginning.
            place = graph.inserting_after(last) if last else graph.inserting_before()
            with place:
                added = self._graph.placeholder(f"arg_{len(self._inputs)}")
            added.meta["val"] = like.meta.get("val")
            self._inputs[name] = added
        return self._inputs[name]
