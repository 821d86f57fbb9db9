"""The work of a traced model: atoms, what they cost, and the values between them.

Equal atoms are traced once, so a model of many equal layers takes little longer than
one of few.
"""

import hashlib
import os.path
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from torch_xla_pp.compile.atom_costs import (
    AtomCosts,
    HeldDim,
    attributes_of,
    costs_of_atom,
    has_rows,
)
from torch_xla_pp.compile.checkpoint_regions import REGION
from torch_xla_pp.compile.value_parts import bytes_of_value
from torch_xla_pp.graph import (
    Atom,
    atoms_of,
    digest_ops,
    erase_marks,
    flops_by_op,
    normalize,
    original_name,
)
from torch_xla_pp.work import (
    Amount,
    Cost,
    ParameterDim,
    Work,
    WorkGraph,
    WorkParameter,
    WorkPart,
    WorkSum,
    WorkValue,
    added_parts,
)

# Weighs FLOPs against bytes written: about the FLOPs that devices do in the time in
# which they move a byte.
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
    """The atoms of a model described as works, in their order."""

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
        self._kept_by: dict[str, list[Atom]] = {}
        self._passed_by: dict[str, list[Atom]] = {}
        self._passed_again_by: dict[str, list[Atom]] = {}
        self._unread_by: dict[str, list[Atom]] = {}
        self._view_of: dict[str, str] = {}
        self._wholes: dict[Atom, dict[str, Amount]] = {}
        self._costs: dict[str, AtomCosts] = {}
        self._dims: dict[str, tuple[ParameterDim | None, ...]] = {}
        (output,) = traced.graph.find_nodes(op="output")
        self._returned = list(dict.fromkeys(output.all_input_nodes))
        self._uses = Counter(name for atom in atoms for name in self._held(atom))

    def graph(self, source: str) -> WorkGraph:
        """Return the work of the model."""
        works = [self._work(atom) for atom in self._atoms]
        values = [self._value(x) for x in self._inputs if x.users]
        for atom in self._atoms:
            values += map(self._value, self._made(atom))
            values += self._whole_values(atom)
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
        held = [*inputs, *attributes_of(atom.runs)]
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
            made=self._made_for_weights(outputs, costs),
            parameters=tuple(self._parameters(atom, len(inputs), costs)),
            sums=tuple(
                WorkSum(when=when, dims=own, size=size)
                for when, dims, size in costs.sums
                if (own := self._dims_of(dims, held))
            ),
            parts=added_parts(
                [
                    WorkPart(dims=own, saved=part.saved, passed=part.passed)
                    for dims, part in costs.parts.items()
                    if (own := self._dims_of(dims, held))
                ]
                + [*self._gradient_parts(outputs, costs)]
            ),
        )

    def _made_for_weights(
        self, outputs: Sequence[fx.Node], costs: AtomCosts
    ) -> dict[str, Amount]:
        """Return what I makes for W, with gradients that it computes or receives.

        Those of the model's outputs are there before, in place of these.
        """
        found = dict(costs.made)
        for remat, passed in costs.passed_gradients.items():
            for node in (outputs[index] for index in passed):
                if node not in self._returned:
                    found[remat] += self._size(node)
        return found

    def _gradient_parts(
        self, outputs: Sequence[fx.Node], costs: AtomCosts
    ) -> Iterator[WorkPart]:
        """Yield what is passed of gradients; those of the model's outputs are whole."""
        for index, node in enumerate(outputs):
            dims = [dim for dim in self._dims[node.name] if dim is not None]
            is_passed = any(index in own for own in costs.passed_gradients.values())
            if dims and is_passed and node not in self._returned:
                size = self._size(node)
                yield WorkPart(
                    dims=tuple(dict.fromkeys(dims)),
                    saved=dict.fromkeys(costs.saved, Amount()),
                    passed={
                        policy: size if index in passed else Amount()
                        for policy, passed in costs.passed_gradients.items()
                    },
                )

    def _size(self, node: fx.Node) -> Amount:
        value = node.meta.get("val")
        count = bytes_of_value(value)
        if node in self._of_batch and has_rows(value, self._rows):
            return Amount(bytes_per_row=count / self._rows)
        return Amount(bytes=count)

    def _dims_of(
        self, dims: Iterable[HeldDim], held: Sequence[fx.Node]
    ) -> tuple[ParameterDim, ...]:
        """Return the dimensions of parameters that dimensions of values are."""
        found = (self._dim_of(dim, held) for dim in dims)
        return tuple(dict.fromkeys(dim for dim in found if dim is not None))

    def _dim_of(
        self, dim: HeldDim | None, held: Sequence[fx.Node]
    ) -> ParameterDim | None:
        """Return the dimension of a parameter that one of an atom's values is."""
        if dim is None:
            return None
        node, number = held[dim[0]], dim[1]
        if node.op == "get_attr":
            return ParameterDim(parameter=self._first_of(node), dim=number)
        known = self._dims.get(node.name, ())
        return known[number] if number < len(known) else None

    def _first_of(self, node: fx.Node) -> str:
        """Return the first name in the model of what an attribute holds."""
        name = original_name(str(node.target))
        return self._first_name.get(name, name)

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
        """Note facts about values that the trace of an atom shows."""
        self._needs_grad |= zip(outputs, costs.outputs_need_grad, strict=True)
        used = [node.name for node in inputs]
        names = [f"{atom.ops[-1].name}.whole_{i}" for i in range(len(costs.wholes))]
        self._wholes[atom] = dict(zip(names, costs.wholes, strict=True))
        made = [*(node.name for node in outputs), *names]
        held = [*inputs, *attributes_of(atom.runs)]
        for name, dims, viewed in zip(
            made, costs.output_dims, costs.viewed, strict=True
        ):
            self._dims[name] = tuple(self._dim_of(dim, held) for dim in dims)
            if viewed is not None:
                seen = used if viewed.is_input else made
                self._view_of[name] = seen[viewed.place]
        kept = [used[i] for i in costs.kept_inputs]
        kept += [made[i] for i in costs.kept_outputs]
        for name in kept:
            self._kept_by.setdefault(name, []).append(atom)
        passed = [used[i] for i in costs.passed_inputs]
        passed += [made[i] for i in costs.passed_outputs]
        for name in passed:
            self._passed_by.setdefault(name, []).append(atom)
        for name in [used[i] for i in costs.passed_again]:
            self._passed_again_by.setdefault(name, []).append(atom)
        for name in [used[i] for i in costs.unread]:
            self._unread_by.setdefault(name, []).append(atom)

    def _used(self, atom: Atom) -> list[fx.Node]:
        """Return the values that an atom uses of others and from outside."""
        own = set(atom.runs)
        read = (node for op in atom.runs for node in op.all_input_nodes)
        return [
            node
            for node in dict.fromkeys(read)
            if node not in own and node.op != "get_attr"
        ]

    def _made(self, atom: Atom) -> list[fx.Node]:
        """Return the values of an atom that others use, or that the model returns."""
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
        found = self._described(node.name, self._size(node), self._home.get(node))
        return replace(
            found,
            has_gradient=self._needs_grad.get(node, False),
            users=self._names(self._users(node)),
        )

    def _whole_values(self, atom: Atom) -> Iterator[WorkValue]:
        """Yield values inside an atom of which others use views alone."""
        for name, size in self._wholes[atom].items():
            yield self._described(name, size, atom)

    def _described(self, name: str, size: Amount, home: Atom | None) -> WorkValue:
        """Return a value without users, with what the traces of atoms show of it."""
        known = (dim for dim in self._dims.get(name, ()) if dim is not None)
        return WorkValue(
            name=name,
            bytes_per_row=size.bytes_per_row,
            bytes=int(size.bytes),
            has_gradient=False,
            producer=None if home is None else home.ops[-1].name,
            users=(),
            kept_by=self._names(self._kept_by.get(name, [])),
            passed_by=self._names(self._passed_by.get(name, [])),
            passed_again_by=self._names(self._passed_again_by.get(name, [])),
            unread_by=self._names(self._unread_by.get(name, [])),
            dims=tuple(dict.fromkeys(known)),
            view_of=self._view_of.get(name),
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
                if isinstance(value, nn.Parameter):
                    found[self._first_of(node)] = value
        return found

    def _parameters(
        self, atom: Atom, num_inputs: int, costs: AtomCosts
    ) -> Iterator[WorkParameter]:
        places = {
            self._first_of(node): place
            for place, node in enumerate(attributes_of(atom.runs), num_inputs)
        }
        for name, value in self._held(atom).items():
            yield WorkParameter(
                name=name,
                shape=tuple(value.shape),
                dtype=str(value.dtype).removeprefix("torch."),
                bytes=value.numel() * value.element_size(),
                tied=name if self._uses[name] > 1 else None,
                read_by=costs.read_by.get(places[name], ()),
                looked_up=costs.looked_up.get(places[name]),
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
