"""What an atom of a model costs, found by tracing it as a stage of its own.

Its values are fake tensors on the XLA device, for which the traces of stages are made:
nothing is computed, and no memory is taken.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from torch_xla_pp.compile.export import export_joint
from torch_xla_pp.compile.joint_graph import JointGraph
from torch_xla_pp.compile.names import (
    index_of_input,
    index_of_tangent,
    is_input,
    is_parameter,
    is_tangent,
    name_in_module,
)
from torch_xla_pp.compile.ops import VIEWS
from torch_xla_pp.compile.partition import Function, StageFunctions, partition_joint
from torch_xla_pp.compile.value_dims import Label, ValueDims, first_label
from torch_xla_pp.compile.value_parts import bytes_of_value, kept_for, whole_of
from torch_xla_pp.graph import Atom
from torch_xla_pp.work import Amount, Cost

_DEVICE = torch.device("xla:0")
_HELD = "held_"
_EMBEDDING = torch.ops.aten.embedding.default
_POLICIES: tuple[Literal["none", "full"], ...] = ("none", "full")


HeldDim = tuple[int, int]
"""Place of an input, or after these of a parameter, and which dimension of it."""


class Viewed(NamedTuple):
    """The value that an output is a view of.

    Attributes:
        is_input: Whether it is an input of the atom.
        place: Which of the inputs, or of the outputs and, after these, the wholes.
    """

    is_input: bool
    place: int


class KeptPart(NamedTuple):
    """What is kept of some values.

    Attributes:
        saved: As `AtomCosts.saved`.
        passed: As `AtomCosts.passed`.
    """

    saved: Mapping[str, Amount]
    passed: Mapping[str, Amount]


@dataclass(frozen=True, kw_only=True, slots=True)
class AtomCosts:
    """The costs of an atom.

    Args:
        forward_moved: Bytes that F moves; its FLOPs are known from the model.
        backward_input: Cost of I.
        backward_weight: Cost of W.
        saved: Policy → what is kept from F to B or I, without inputs and outputs.
        passed: Policy → what is kept from I to W, without inputs and outputs.
        made: Policy → what of `passed` its I makes, without gradients of outputs.
        kept_inputs: Which inputs the backward reads.
        kept_outputs: Which outputs and wholes it reads.
        passed_inputs: Which inputs W reads if nothing is computed again.
        passed_again: Which others it reads else.
        unread: Which inputs I does not read then.
        passed_outputs: Which outputs and wholes it reads then.
        outputs_need_grad: Which outputs have a gradient.
        wholes: Sizes of values inside the atom of which outputs are parts. They count
            as further outputs, with the numbers after those.
        viewed: For each output, and each whole, what it is a view of, None for nothing.
        output_dims: For each of them and each of its dimensions the one of an input or
            a parameter that it is, None for none.
        sums: What is summed over such dimensions, see `WorkSum`.
        parts: What is kept of values with such dimensions, see `WorkPart`; that of
            gradients of outputs, which may come whole from elsewhere, is not in it.
        passed_gradients: Which outputs' gradients are passed, by policy.
        read_by: Which of "F", "I" and "W" read each parameter.
        looked_up: Size of what is looked up in each table.
    """

    forward_moved: Amount
    backward_input: Cost
    backward_weight: Cost
    saved: Mapping[str, Amount]
    passed: Mapping[str, Amount]
    made: Mapping[str, Amount]
    kept_inputs: frozenset[int]
    kept_outputs: frozenset[int]
    passed_inputs: frozenset[int]
    passed_again: frozenset[int]
    unread: frozenset[int]
    passed_outputs: frozenset[int]
    outputs_need_grad: tuple[bool, ...]
    wholes: tuple[Amount, ...]
    viewed: tuple[Viewed | None, ...]
    output_dims: tuple[tuple[HeldDim | None, ...], ...]
    sums: tuple[tuple[str, tuple[HeldDim, ...], Amount], ...]
    parts: Mapping[tuple[HeldDim, ...], KeptPart]
    passed_gradients: Mapping[str, tuple[int, ...]]
    read_by: Mapping[int, tuple[str, ...]]
    looked_up: Mapping[int, Amount]


def costs_of_atom(
    traced: fx.GraphModule,
    atom: Atom,
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    needs_grad: Sequence[bool],
    rows: int,
) -> AtomCosts:
    """Trace an atom and its backward, and return what they cost.

    Args:
        traced: The model that it is a part of.
        atom: The atom.
        inputs: Values of other atoms that it uses.
        outputs: Its values that other atoms use.
        needs_grad: Which of the inputs have a gradient.
        rows: Rows of a microbatch in the trace; 0 if none of this depends on it.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Tensor) -> Tensor:
        size, stride = tuple(value.shape), value.stride()
        data = torch.empty_strided(size, stride, dtype=value.dtype, device="meta")
        return FakeTensor(mode, data, _DEVICE)

    module = _module_of(traced, atom, inputs, outputs, fake)
    examples = [
        fake(node.meta["val"]).requires_grad_(flag)
        for node, flag in zip(inputs, needs_grad, strict=True)
    ]
    joint = export_joint(module, examples, {})
    return _Sizes(joint, rows).costs()


def cost_of_function(joint: JointGraph, function: Function, rows: int) -> Cost:
    """Return what a function of a joint graph computes and moves.

    Args:
        joint: The graph.
        function: The function.
        rows: As for `costs_of_atom`.
    """
    return _Sizes(joint, rows).cost(function)


def _module_of(
    traced: fx.GraphModule,
    atom: Atom,
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    fake: Callable[[Tensor], Tensor],
) -> fx.GraphModule:
    """Return an atom as a module with parameters of its own."""
    root, graph = nn.Module(), fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in attributes_of(atom.runs):
        name = f"{_HELD}{len(copies)}"
        value = _attribute(traced, str(node.target))
        held = fake(value)
        if isinstance(value, nn.Parameter):
            root.register_parameter(name, nn.Parameter(held, value.requires_grad))
        else:
            root.register_buffer(name, held)
        copies[node] = graph.get_attr(name)
    for node in atom.runs:
        copy = graph.node_copy(node, copies.__getitem__)
        copy.args, copy.kwargs = pytree.tree_map_only(
            torch.device, lambda _: _DEVICE, (copy.args, copy.kwargs)
        )
        copies[node] = copy
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(root, graph)


def attributes_of(ops: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the parameters and buffers that operations read."""
    read = (node for op in ops for node in op.all_input_nodes)
    return list(dict.fromkeys(node for node in read if node.op == "get_attr"))


def _attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


class _Sizes:
    """The costs of an atom, by the sizes of values in its joint graph.

    Args:
        joint: The graph.
        rows: As for `costs_of_atom`.
    """

    def __init__(self, joint: JointGraph, rows: int) -> None:
        self._joint = joint
        self._rows = rows
        nodes = joint.graph.graph.nodes
        self._nodes = {joint.roles.get(node, node.name): node for node in nodes}
        self._gradients = {_viewed(x) for x in joint.parameter_grads.values()}
        self._gradients |= set(joint.parameter_grads.values())
        self._sources = [
            kept_for(node.all_input_nodes[0] if place in joint.copied else node)
            for place, node in enumerate(joint.outputs)
        ]
        self._outputs = self._places_of_outputs()
        num_outputs = len(joint.outputs)
        self._wholes = [x for x, i in self._outputs.items() if i >= num_outputs]
        self._of_batch = _reached_from(
            nodes, {n for n, r in joint.roles.items() if is_input(r) or is_tangent(r)}
        )

    def costs(self) -> AtomCosts:
        """Return all that is known of the atom."""
        cuts = {policy: partition_joint(self._joint, policy) for policy in _POLICIES}
        cut = cuts["none"]
        read = self._saved(cut)
        saved: dict[str, set[fx.Node]] = {p: self._saved(x) for p, x in cuts.items()}
        passed: dict[str, set[fx.Node]] = {p: self._passed(x) for p, x in cuts.items()}
        read_late = self._inputs_in(passed["none"])
        dims = ValueDims(self._joint)
        return AtomCosts(
            forward_moved=self._moved(cut.forward),
            backward_input=self.cost(cut.backward_input),
            backward_weight=self.cost(cut.backward_weight),
            saved={policy: self._kept(nodes) for policy, nodes in saved.items()},
            passed={policy: self._kept(nodes) for policy, nodes in passed.items()},
            made={
                policy: self._kept(
                    node for node in nodes - saved[policy] if not self._tangents([node])
                )
                for policy, nodes in passed.items()
            },
            kept_inputs=self._inputs_in(read),
            kept_outputs=self._outputs_in(read),
            passed_inputs=read_late,
            passed_again=self._inputs_in(passed["full"]) - read_late,
            unread=self._unread(cuts["full"]),
            passed_outputs=self._outputs_in(passed["none"]),
            outputs_need_grad=tuple(self._joint.outputs_need_grad),
            wholes=tuple(map(self._amount, self._wholes)),
            viewed=tuple(self._views()),
            output_dims=tuple(
                tuple(map(_held_dim, map(first_label, dims.of(node))))
                for node in (*self._joint.outputs, *self._wholes)
            ),
            sums=tuple(self._sums(dims, cut)),
            parts=self._parts(dims, saved, passed),
            passed_gradients={
                policy: tuple(sorted(map(index_of_tangent, self._tangents(nodes))))
                for policy, nodes in passed.items()
            },
            read_by=self._read_by(cut),
            looked_up=self._looked_up(),
        )

    def _places_of_outputs(self) -> dict[fx.Node, int]:
        """Return what is kept for outputs, with the place of one of the same size.

        Where there is none, and for what outputs are parts of, it is a whole with a
        place of its own, after the outputs.
        """
        found: dict[fx.Node, int] = {}
        outputs, roles = self._joint.outputs, self._joint.roles
        for place, (node, source) in enumerate(
            zip(outputs, self._sources, strict=True)
        ):
            if source not in roles and self._bytes(node) == self._bytes(source):
                found.setdefault(source, place)
        kept = [x for source in self._sources for x in _with_wholes(source)]
        wholes = (x for x in kept if x not in roles and x not in found)
        places = zip(dict.fromkeys(wholes), count(len(outputs)), strict=False)
        return found | dict(places)

    def _views(self) -> Iterator[Viewed | None]:
        """Yield what each output, and each whole, is a view of."""
        for place, source in enumerate((*self._sources, *self._wholes)):
            # What is kept for the first of several equal outputs may be a part.
            is_own = self._outputs.get(source) == place
            whole = whole_of(source) if is_own else source
            role = "" if whole is None else self._joint.roles.get(whole, "")
            if is_input(role):
                yield Viewed(True, index_of_input(role))
            elif whole in self._outputs:
                yield Viewed(False, self._outputs[whole])
            else:
                yield None

    def _sums(
        self, dims: ValueDims, cut: StageFunctions
    ) -> Iterator[tuple[str, tuple[HeldDim, ...], Amount]]:
        """Yield what is summed over dimensions, and when."""
        when_of = {
            node: when
            for when, function in reversed([*_by_action(cut)])
            for node in self._ops_of(function)
        }
        for found in dims.sums():
            labels = _held_dims(found.labels)
            if found.node in when_of and labels:
                yield when_of[found.node], labels, self._amount(found.node)

    def _parts(
        self,
        dims: ValueDims,
        saved: Mapping[str, set[fx.Node]],
        passed: Mapping[str, set[fx.Node]],
    ) -> dict[tuple[HeldDim, ...], KeptPart]:
        """Return what is kept by the dimensions of values."""
        found: dict[tuple[HeldDim, ...], tuple[set[fx.Node], ...]] = {}
        for place, own in enumerate([*saved.values(), *passed.values()]):
            for node in own:
                labels = _held_dims(dims.labels(node))
                if labels and not self._tangents([node]):
                    groups = found.setdefault(labels, (set(), set(), set(), set()))
                    groups[place].add(node)
        parts = {}
        for labels, (*kept, late, late_again) in sorted(found.items()):
            part = KeptPart(
                saved=dict(zip(saved, map(self._kept, kept), strict=True)),
                passed=dict(
                    zip(passed, map(self._kept, (late, late_again)), strict=True)
                ),
            )
            if any(x != Amount() for own in part for x in own.values()):
                parts[labels] = part
        return parts

    def _tangents(self, nodes: Iterable[fx.Node]) -> list[str]:
        roles = (self._joint.roles.get(node, "") for node in nodes)
        return [role for role in roles if is_tangent(role)]

    def _read_by(self, cut: StageFunctions) -> dict[int, tuple[str, ...]]:
        """Return which actions read each parameter."""
        found: dict[int, tuple[str, ...]] = {}
        for when, function in _by_action(cut):
            for name in function.inputs:
                place = _place_of_held(name) if is_parameter(name) else None
                if place is not None:
                    found[place] = (*found.get(place, ()), when)
        return found

    def _looked_up(self) -> dict[int, Amount]:
        """Return the sizes of what is looked up in tables."""
        found: dict[int, Amount] = {}
        graph = self._joint.graph.graph
        for node in graph.find_nodes(op="call_function", target=_EMBEDDING):
            role = self._joint.roles.get(_viewed(node.args[0]), "")
            place = _place_of_held(role) if is_parameter(role) else None
            if place is not None:
                found[place] = found.get(place, Amount()) + self._amount(node)
        return found

    def _saved(self, cut: StageFunctions) -> set[fx.Node]:
        """Return what a backward reads of a forward and of its inputs."""
        computed = set(cut.forward.outputs)
        pieces = (cut.backward, cut.backward_input, cut.backward_weight)
        names = {name for piece in pieces if piece for name in piece.inputs}
        return {
            self._nodes[name] for name in names if name in computed or is_input(name)
        }

    def _unread(self, cut: StageFunctions) -> frozenset[int]:
        """Return the inputs that a backward of inputs does not read."""
        names = {name for name in self._joint.roles.values() if is_input(name)}
        if cut.backward_input is not None:
            names -= {*cut.backward_input.inputs}
        return frozenset(map(index_of_input, names))

    def _inputs_in(self, nodes: Iterable[fx.Node]) -> frozenset[int]:
        roles = (self._joint.roles.get(node, "") for node in nodes)
        return frozenset(index_of_input(role) for role in roles if is_input(role))

    def _outputs_in(self, nodes: Iterable[fx.Node]) -> frozenset[int]:
        return frozenset(self._outputs[node] for node in nodes if node in self._outputs)

    def _kept(self, nodes: Iterable[fx.Node]) -> Amount:
        """Return the bytes of what is kept inside the atom."""
        total = Amount()
        for node in nodes:
            role = self._joint.roles.get(node)
            if node not in self._outputs and (role is None or is_tangent(role)):
                total += self._amount(node)
        return total

    def _passed(self, cut: StageFunctions) -> set[fx.Node]:
        """Return what W reads of microbatches.

        Gradients of outputs are among it: the stage computes or receives them.
        """
        if cut.backward_weight is None:
            return set()
        names = [name for name in cut.backward_weight.inputs if name in self._nodes]
        nodes = {self._nodes[name]: name for name in names}
        return {
            node
            for node, name in nodes.items()
            if node not in self._joint.roles or is_input(name) or is_tangent(name)
        }

    def cost(self, function: Function | None) -> Cost:
        """Return what a function computes and moves."""
        if function is None:
            return Cost()
        flops = sum(map(_flops, self._ops_of(function)))
        moved = self._moved(function)
        has_rows = bool(self._rows)
        return Cost(
            flops_per_row=flops / self._rows if has_rows else 0.0,
            flops=0 if has_rows else flops,
            bytes_per_row=moved.bytes_per_row,
            bytes=moved.bytes,
        )

    def _moved(self, function: Function) -> Amount:
        """Return what a function reads from memory and writes to it.

        Products of matrices read all their operands and write their results. The
        operations between them, and at both ends, are assumed to be fused.
        """
        names = {*function.inputs, *function.outputs} & set(self._nodes)
        moved = Amount()
        for node in {_viewed(self._nodes[name]) for name in names}:
            moved += self._amount(node)
        for op in [op for op in self._ops_of(function) if _flops(op)]:
            for node in (op, *op.all_input_nodes):
                moved += self._amount(_viewed(node))
        return moved

    def _ops_of(self, function: Function) -> list[fx.Node]:
        """Return the joint graph's nodes of a function, without sums of gradients."""
        graph: Any = function.module.graph
        (output,) = graph.find_nodes(op="output")
        named = zip(function.outputs, output.args[0], strict=True)
        sums = {node for name, node in named if name not in self._nodes}
        return [
            self._nodes[node.name]
            for node in graph.nodes
            if node.op == "call_function" and node not in sums
        ]

    def _amount(self, node: fx.Node) -> Amount:
        """Return the size of a value; gradients of parameters have no rows."""
        count = self._bytes(node)
        is_of_batch = node in self._of_batch and node not in self._gradients
        if is_of_batch and has_rows(node.meta.get("val"), self._rows):
            return Amount(bytes_per_row=count / self._rows)
        return Amount(bytes=count)

    def _bytes(self, node: fx.Node) -> int:
        return bytes_of_value(node.meta.get("val"))


def _by_action(cut: StageFunctions) -> Iterator[tuple[str, Function]]:
    """Yield the functions of F, I and W that there are."""
    functions = cut.forward, cut.backward_input, cut.backward_weight
    for when, function in zip("FIW", functions, strict=True):
        if function is not None:
            yield when, function


def _place_of_held(role: str) -> int | None:
    """Return the place of an input or of a parameter, None for what is neither."""
    if is_input(role):
        return index_of_input(role)
    if is_parameter(role):
        return int(name_in_module(role).removeprefix(_HELD))
    return None


def _held_dim(label: Label | None) -> HeldDim | None:
    place = None if label is None else _place_of_held(label[0])
    return None if label is None or place is None else (place, label[1])


def _held_dims(labels: Iterable[Label]) -> tuple[HeldDim, ...]:
    return tuple(dim for dim in map(_held_dim, labels) if dim is not None)


def has_rows(value: Any, rows: int) -> bool:
    """Return whether a value of a batch grows with its rows, judged by its shape.

    Its first dimension then is a multiple of the rows, or another is just them.

    Args:
        value: The value.
        rows: Rows of the batch; 0 if there is none.
    """
    tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
    return rows > 0 and any(
        rows in x.shape or (x.dim() > 0 and x.shape[0] % rows == 0) for x in tensors
    )


def _viewed(node: fx.Node) -> fx.Node:
    """Return the value that a view is of."""
    while node.target in VIEWS or node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


def _with_wholes(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a value, and what it is a part of."""
    found: fx.Node | None = node
    while found is not None:
        yield found
        found = whole_of(found)


def _reached_from(nodes: Iterable[fx.Node], first: set[fx.Node]) -> set[fx.Node]:
    """Return nodes and all that is computed from them."""
    found = set(first)
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _flops(node: fx.Node) -> int:
    """Count what torch's counter of FLOPs counts for an operation."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in flop_registry:
        return 0
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda value: value.meta.get("val")
    )
    return int(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
