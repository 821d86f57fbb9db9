"""The work of a traced model: atoms, what they cost, and the values between them.

Equal atoms are traced once, so a model of many equal layers takes little longer than
one of few.
"""

import hashlib
import os.path
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from torch_xla_pp.compile.atom_costs import (
    AtomCosts,
    bytes_of_value,
    costs_of_atom,
    has_rows,
)
from torch_xla_pp.compile.checkpoint_regions import REGION
from torch_xla_pp.graph import (
    Atom,
    atoms_of,
    digest_ops,
    erase_marks,
    flops_by_op,
    normalize,
    original_name,
)
from torch_xla_pp.work import Amount, Cost, Work, WorkGraph, WorkParameter, WorkValue

# To weigh what an operation computes against what it writes: of the order of the FLOPs
# that devices do in the time in which they move a byte.
_FLOPS_PER_BYTE = 100
_NO_ROWS = 0


def work_of(
    traced: fx.GraphModule,
    split_mark: Any,
    names: Sequence[tuple[str, ...]],
    *,
    max_stages: int,
    source: str = "",
) -> WorkGraph:
    """Return the work of a traced model.

    Args:
        traced: The model, as exported for training; changed in place.
        split_mark: Target of nodes that are marks, which do not count.
        names: All names of each parameter of the model.
        max_stages: For how many stages its atoms are to be small enough.
        source: Where the model comes from, for printing.

    Raises:
        PlanError: The model has what cannot be split.
    """
    written = normalize(traced, split_mark)
    erase_marks(traced.graph, split_mark)
    flops = flops_by_op(traced)
    regions = {n: n.meta[REGION] for n in traced.graph.nodes if REGION in n.meta}
    weights = {
        node: flops.get(node.name, 0)
        + _FLOPS_PER_BYTE * bytes_of_value(node.meta.get("val"))
        for node in traced.graph.nodes
    }
    atoms = atoms_of(traced, written, weights, regions, max_stages=max_stages)
    return _Described(traced, atoms, flops, names).graph(source)


class _Described:
    """Describes the atoms of a model, in their order."""

    def __init__(
        self,
        traced: fx.GraphModule,
        atoms: Sequence[Atom],
        flops: Mapping[str, int],
        names: Sequence[tuple[str, ...]],
    ) -> None:
        self._traced = traced
        self._atoms = atoms
        self._flops = flops
        self._first_name = {name: group[0] for group in names for name in group}
        nodes = traced.graph.nodes
        self._inputs = [
            node
            for node in nodes
            if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor)
        ]
        shapes = [tuple(node.meta["val"].shape) for node in self._inputs]
        self._rows = next((shape[0] for shape in shapes if shape), 1)
        self._of_batch = _of_batch(nodes)
        self._home = {op: atom for atom in atoms for op in atom.ops}
        self._needs_grad: dict[fx.Node, bool] = {}
        self._kept_by: dict[fx.Node, list[Atom]] = {}
        self._passed_by: dict[fx.Node, list[Atom]] = {}
        self._costs: dict[str, AtomCosts] = {}
        (output,) = traced.graph.find_nodes(op="output")
        self._returned = list(dict.fromkeys(output.all_input_nodes))
        self._uses = Counter(name for atom in atoms for name in self._held(atom))

    def graph(self, source: str) -> WorkGraph:
        """Return the work of the model."""
        works = [self._work(atom) for atom in self._atoms]
        made = [op for atom in self._atoms for op in self._made(atom)]
        inputs = [x for x in self._inputs if x.users]
        values = [self._value(node) for node in (*inputs, *made)]
        return WorkGraph(
            works=tuple(works),
            values=tuple(values),
            rows=self._rows,
            outputs=tuple(node.name for node in self._returned),
            op_digests=digest_ops(self._traced.graph, sorted(self._home)),
            source=source,
        )

    def _work(self, atom: Atom) -> Work:
        inputs, outputs = self._used(atom), self._made(atom)
        needs_grad = [self._needs_grad.get(node, False) for node in inputs]
        is_of_batch = any(op in self._of_batch for op in atom.ops)
        rows = self._rows if is_of_batch else _NO_ROWS
        digest = self._digest(atom, inputs, outputs, needs_grad)
        if digest not in self._costs:
            self._costs[digest] = costs_of_atom(
                self._traced, atom, inputs, outputs, needs_grad, rows
            )
        costs = self._costs[digest]
        self._note(atom, inputs, outputs, costs)
        return Work(
            name=atom.ops[-1].name,
            ops=tuple(op.name for op in atom.ops),
            module=_module(atom),
            digest=digest,
            forward=self._forward(atom, costs.forward_moved, rows),
            backward_input=costs.backward_input,
            backward_weight=costs.backward_weight,
            saved=costs.saved,
            passed=costs.passed,
            parameters=tuple(self._parameters(atom)),
        )

    def _forward(self, atom: Atom, moved: Amount, rows: int) -> Cost:
        flops = sum(self._flops.get(op.name, 0) for op in atom.ops)
        return Cost(
            flops_per_row=flops / rows if rows else 0.0,
            flops=0 if rows else flops,
            bytes_per_row=moved.bytes_per_row,
            bytes=moved.bytes,
        )

    def _note(
        self,
        atom: Atom,
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        costs: AtomCosts,
    ) -> None:
        """Note of values what the trace of an atom says of them."""
        self._needs_grad |= zip(outputs, costs.outputs_need_grad, strict=True)
        kept = [inputs[i] for i in costs.kept_inputs]
        kept += [outputs[i] for i in costs.kept_outputs]
        for node in kept:
            self._kept_by.setdefault(node, []).append(atom)
        passed = [inputs[i] for i in costs.passed_inputs]
        passed += [outputs[i] for i in costs.passed_outputs]
        for node in passed:
            self._passed_by.setdefault(node, []).append(atom)

    def _used(self, atom: Atom) -> list[fx.Node]:
        """Return the values that an atom takes from others and from outside."""
        own = set(atom.runs)
        read = (node for op in atom.runs for node in op.all_input_nodes)
        return [
            node
            for node in dict.fromkeys(read)
            if node not in own and node.op != "get_attr"
        ]

    def _made(self, atom: Atom) -> list[fx.Node]:
        """Return the values of an atom that others take, or that the model returns."""
        return [op for op in atom.ops if op in self._returned or self._users(op)]

    def _users(self, node: fx.Node) -> list[Atom]:
        """Return the other atoms that use a value, in order."""
        home = self._home.get(node)
        users = {self._home[user] for user in node.users if user in self._home}
        return [
            atom
            for atom in self._atoms
            if atom in users and atom is not home and node not in atom.runs
        ]

    def _value(self, node: fx.Node) -> WorkValue:
        value = node.meta.get("val")
        count = bytes_of_value(value)
        home = self._home.get(node)
        is_per_row = node in self._of_batch and has_rows(value, self._rows)
        kept, passed = self._kept_by.get(node, []), self._passed_by.get(node, [])
        return WorkValue(
            name=node.name,
            bytes_per_row=count / self._rows if is_per_row else 0.0,
            bytes=0 if is_per_row else count,
            has_gradient=self._needs_grad.get(node, False),
            producer=None if home is None else home.ops[-1].name,
            users=self._names(self._users(node)),
            kept_by=self._names(kept),
            passed_by=self._names(passed),
        )

    def _names(self, atoms: Collection[Atom]) -> tuple[str, ...]:
        """Return the names of atoms, in order."""
        return tuple(atom.ops[-1].name for atom in self._atoms if atom in atoms)

    def _held(self, atom: Atom) -> dict[str, Tensor]:
        """Return the parameters of an atom, by their first names in the model."""
        read = (node for op in atom.runs for node in op.all_input_nodes)
        found: dict[str, Tensor] = {}
        for node in read:
            if node.op == "get_attr":
                value = _attribute(self._traced, str(node.target))
                name = original_name(str(node.target))
                if isinstance(value, nn.Parameter):
                    found[self._first_name.get(name, name)] = value
        return found

    def _parameters(self, atom: Atom) -> Iterator[WorkParameter]:
        for name, value in self._held(atom).items():
            yield WorkParameter(
                name=name,
                shape=tuple(value.shape),
                dtype=str(value.dtype).removeprefix("torch."),
                bytes=value.numel() * value.element_size(),
                tied=name if self._uses[name] > 1 else None,
            )

    def _digest(
        self,
        atom: Atom,
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        needs_grad: Sequence[bool],
    ) -> str:
        """Return a text that is equal for atoms that compute the same in any batch."""
        number: dict[fx.Node, int] = {}
        parts: list[Any] = []
        for node, flag in zip(inputs, needs_grad, strict=True):
            number[node] = len(number)
            parts.append((flag, self._form(node)))
        for op in atom.runs:
            for node in op.all_input_nodes:
                if node not in number:
                    number[node] = len(number)
                    parts.append(self._form_held(node))
            number[op] = len(number)
            parts.append((str(op.target), _arguments(op, number), self._form(op)))
            parts.append(op.meta.get(REGION) is not None)
        parts.append([number[node] for node in outputs])
        text = repr(parts)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def _form(self, node: fx.Node) -> Any:
        """Return types and sizes of a value, for one row."""
        tensors = pytree.tree_leaves(node.meta.get("val"))
        rows = self._rows if node in self._of_batch else 1
        return [
            (str(x.dtype), x.dim(), x.numel() / rows)
            for x in tensors
            if isinstance(x, Tensor)
        ]

    def _form_held(self, node: fx.Node) -> Any:
        value = _attribute(self._traced, str(node.target))
        kind = type(value).__name__
        return kind, tuple(value.shape), str(value.dtype), value.requires_grad


def _of_batch(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the model's inputs and what is computed from them."""
    found: set[fx.Node] = set()
    for node in nodes:
        if node.op == "placeholder" or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _arguments(op: fx.Node, number: Mapping[fx.Node, int]) -> str:
    """Return the arguments of an operation without whole numbers, which are sizes."""
    leaves = pytree.tree_leaves((op.args, op.kwargs))
    kept = [
        number[leaf] if isinstance(leaf, fx.Node) else f"{type(leaf).__name__} {leaf}"
        for leaf in leaves
        if type(leaf) is not int
    ]
    return repr(kept)


def _module(atom: Atom) -> str:
    """Return the path of the module that all operations of an atom are in."""
    stacks = (op.meta.get("nn_module_stack") for op in atom.ops)
    paths = [_path(list(stack.values())[-1][0]) for stack in stacks if stack]
    return ".".join(os.path.commonprefix(paths))


def _path(text: str) -> list[str]:
    """Return the parts of a path as torch.export has it, `L['self'].layers[0].up`."""
    return re.findall(r"\w+", re.sub(r"^L\['\w*'\]", "", text))


def _attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module
